"""shard_trainer writes all adapters of a PEFT model, of any kind, as one process does."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.comm.process_group import world
from tests.integrations.test_trainer import llama, rows
from tests.support.pool import run_on_ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))),
    reason="transformers, accelerate or peft is not installed",
)
LORA = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "two": ("LoraConfig", {**LORA, "modules_to_save": ["lm_head"]}, ["default", "second"]),
    "own name": ("LoraConfig", {**LORA, "bias": "all"}, ["mine"]),
    "prompt": ("PromptTuningConfig", PROMPT, ["default"]),
    "prefix": (
        "PrefixTuningConfig",
        {**PROMPT, "prefix_projection": True, "encoder_hidden_size": 5},
        ["default"],
    ),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}, ["default"]),
}


def tuned(degrees: dict[str, int] | None, folder: Path) -> list[str]:
    """Trains the last adapter of each case, and saves. Returns the case of each error."""
    import peft
    from transformers import Trainer, TrainingArguments

    folder = folder / str(world()[0])
    around = dt.integrations.one_process() if degrees else contextlib.nullcontext()
    with around, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (kind, options, adapters) in CASES.items():
            model = llama()
            model.set_attn_implementation("eager")
            first, *rest = adapters
            model = peft.get_peft_model(model, getattr(peft, kind)(**options), first)
            for other in rest:
                model.add_adapter(other, getattr(peft, kind)(**options))
            model.set_adapter(adapters[-1])
            arguments = TrainingArguments(
                str(folder / name), max_steps=1, per_device_train_batch_size=4, learning_rate=0.1,
                save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows(4))
            if degrees:
                dt.integrations.shard_trainer(trainer, dt.Strategy(**degrees))
            trainer.train()
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


@pytest.mark.limit(240)
def test_each_adapter_is_written_with_what_it_has_learned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    [wanted] = run_on_ranks(1, tuned, None, tmp_path / "one", timeout=100)
    assert run_on_ranks(2, tuned, {"sharding": 2}, tmp_path, timeout=100) == [wanted, []]
    weights = [name for name in wanted if name.endswith(".safetensors")]
    assert len(weights) == 6
    for name in weights:
        mine, theirs = (load_file(tmp_path / rank / name) for rank in ("0", "one/0"))
        assert mine.keys() == theirs.keys() and mine, name
        for key, value in mine.items():
            torch.testing.assert_close(
                value, theirs[key], rtol=1e-3, atol=1e-4, msg=f"{name} {key}"
            )
