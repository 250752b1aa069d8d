"""from_pretrained: a model from files or a module, under a strategy, gives the values of one
process."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.pool import on_ranks, run_on_ranks

transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def saved(name: str, folder: Path) -> None:
    """Writes a model of transformers, with a tied head or with experts."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    torch.manual_seed(0)
    llama = LlamaConfig(**SIZES, tie_word_embeddings=True)
    config = llama if name == "llama" else MixtralConfig(**SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def loaded(strategy: Any, folder: Path, expected: int) -> None:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        model = dt.from_pretrained(folder, strategy)
        tokens = torch.randint(1, 96, (4, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), dt.values_everywhere():
            logits = dt.broadcast_value(model(tokens).logits)
            torch.testing.assert_close(logits, plain(tokens).logits)
            words, wanted = (
                m.generate(tokens, max_new_tokens=4, do_sample=False) for m in (model, plain)
            )
            assert words.tolist() == wanted.tolist()
    held = {id(p): p.local.numel() for p in model.parameters()}
    assert sum(held.values()) <= expected, held
    half = dt.from_pretrained(folder, strategy, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and not half.training


@transformers
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    ("name", "degrees", "held"),
    [("llama", {"tp": 2}, 0.6), ("llama", {"sharding": 2}, 0.51), ("llama", {"pp": 2}, 0.8),
     ("mixtral", {"tp": 2}, 0.6)],
)  # fmt: skip
def test_each_rank_has_its_part_and_generates_the_same_tokens(
    name: str, degrees: dict[str, int], held: float, tmp_path: Path
) -> None:
    run_on_ranks(1, saved, name, tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        numel = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    strategy = dt.Strategy(**degrees)
    run_on_ranks(2, loaded, strategy, tmp_path, int(held * numel), timeout=120)


def configured(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    plan = {"model.layers.*.mlp.up_proj": "rowwise"}
    config = DistributedConfig(tp_size=2, tp_plan=plan)
    model: Any = dt.from_pretrained(LlamaForCausalLM(LlamaConfig(**SIZES)), config)
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.weight.placements[3] == dt.Shard(0)
    assert layer.mlp.up_proj.weight.placements[3] == dt.Shard(1)
    assert model.model.norm.weight.placements[3] == dt.Replicate()
    with pytest.raises(TypeError, match=r"strategy=.*a dt.Strategy, or a DistributedConfig"):
        dt.from_pretrained(nn.Linear(2, 2), DistributedConfig(tp_size=2, ep_size=2))


@transformers
@pytest.mark.limit(240)
def test_a_distributed_config_and_the_plan_of_the_model(tmp_path: Path) -> None:
    run_on_ranks(2, configured, tmp_path, timeout=120)


@on_ranks(2)
def test_a_module_under_a_strategy():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    images = torch.randn(6, 3, 8, 8)
    wanted = plain(images)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    model = dt.from_pretrained(model, dt.Strategy(sharding=2))
    result = model(images)
    assert result.placements[1] == dt.Shard(0)
    torch.testing.assert_close(result.full_tensor(), wanted)
    assert model(images[:1]).placements[1] == dt.Replicate()  # one row is not split
