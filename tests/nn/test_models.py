"""Models of Hugging Face transformers, unmodified: loss and all gradients on a mesh are those of
one process."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.examples import printed_by
from tests.support.models.case import Case, check
from tests.support.pool import on_ranks, run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
TRAINERS = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "peft"))),
    reason="peft or accelerate is not installed",
)
NAMES = ["gpt2", "llama", "bert", "t5", "mixtral", "mixtral, grouped", "vit", "uneven llama"]


def case(name: str) -> Case:
    """On the ranks only: importing transformers takes seconds."""
    models = importlib.import_module("tests.support.models.huggingface")
    return next(c for c in [*models.CASES, models.GROUPED, models.UNEVEN] if c.name == name)


def pair(axis: str) -> dt.ProcessMesh:
    return dt.ProcessMesh([0, 1], (axis,))


def square() -> dt.ProcessMesh:
    return dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@on_ranks(2, timeout=120)
def test_two_ranks(name: str, axis: str) -> None:
    check(case(name), pair(axis))


@pytest.mark.parametrize("name", NAMES)
@on_ranks(4, timeout=120)
def test_dp_x_tp(name: str) -> None:
    check(case(name), square())


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=120)
def test_two_ranks_with_sharded_state(name: str) -> None:
    check(case(name), pair("dp"), stage=3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@on_ranks(4, timeout=120)
def test_dp_x_tp_with_sharded_state(name: str) -> None:
    check(case(name), square(), stage=3)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=120)
def test_the_proposed_plan(name: str) -> None:
    made = case(name)
    plan = dt.plans.megatron(made.model(), "tp", pair("tp"))
    assert any(isinstance(p, Shard) for placements in plan.values() for p in placements)
    check(made, pair("tp"), plan)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
@on_ranks(4, timeout=120)
def test_the_proposed_plan_on_dp_x_tp(name: str) -> None:
    made = case(name)
    check(made, square(), dt.plans.megatron(made.model(), "tp", square()))


@pytest.mark.parametrize("way", ["gather", "ring", "heads"])
@pytest.mark.parametrize("name", ["llama", "llama, documents", "gpt2, eager", "bert"])
@on_ranks(2, timeout=120)
def test_a_split_sequence(name: str, way: str) -> None:
    name, _, how = name.partition(", ")
    made = case(name)
    if how == "documents":  # of which each begins at position 0
        places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        made = replace(
            made, batch=lambda: {**case(name).batch(), "position_ids": places.repeat(4, 1)}
        )

    def build() -> Any:
        model: Any = case(name).build()
        model.set_attn_implementation(how if how == "eager" else "sdpa")
        model.config.use_cache = False  # with one, transformers looks for no documents
        return model

    with dt.attention.policy(way):
        check(replace(made, build=build, batch_dim=1), pair("dp"))


def printed_quietly(name: str) -> str:
    """Trainer warns of what transformers calls by its old name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return printed_by(name)


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        ("llama", 4, "model.layers.*.self_attn.q_proj.weight"),
        pytest.param(
            "trainer",
            2,
            "adapter_config.json adapter_model.safetensors",
            marks=TRAINERS,
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.limit(240)
def test_an_example_has_the_same_losses_on_one_process_and_on_several(
    name: str, ranks: int, says: str
) -> None:
    losses = []
    for world in (1, ranks):
        out = run_on_ranks(world, printed_quietly, name, timeout=100)[0]
        assert says in out
        losses.append([float(line.split()[3]) for line in out.splitlines() if line[:4] == "step"])
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert losses[0][-1] < losses[0][0] - 1.0


# What a model with two layers sends over tp. Each way, on activations [batch, time, width]: one for
# each place where a split layer ends (forward) or begins (backward); and what the loss over a split
# vocabulary needs, per token.
WIDE, LOSS = [4, 7, 16], [[28], [2, 28]]
EXPECTED: dict[str, dict[str, list[Any]]] = {
    # embedding, attention and MLP of both layers; attention and MLP of both layers, head
    "llama": {"forward": [WIDE] * 5 + LOSS, "backward": [WIDE] * 5},
    # as above; attention has q, k and v in one matrix and is whole
    "gpt2": {"forward": [WIDE] * 3 + LOSS, "backward": [WIDE] * 3},
}


@pytest.mark.parametrize("proposed", [False, True])
@pytest.mark.parametrize("name", EXPECTED)
@on_ranks(2, timeout=120)
def test_megatrons_all_reduces_and_nothing_else(name: str, proposed: bool) -> None:
    made = case(name)
    plan = dt.plans.megatron(made.model(), 0) if proposed else None
    log = check(made, pair("tp"), plan)
    assert {r.kind for r in log} == {"all_reduce"}, str(log)
    for phase, shapes in EXPECTED[name].items():
        assert [list(r.shape) for r in log if r.phase == phase] == shapes, str(log)


def layouts(plan: dt.plans.Proposal) -> dict[str, int]:
    """name -> the dim that is split"""
    return {
        name: p.dim for name, placements in plan.items() for p in placements if isinstance(p, Shard)
    }


def test_a_proposal_for_llama_is_the_plan_that_a_person_writes() -> None:
    plan = dt.plans.megatron(case("llama").build())
    want = {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
    for i in range(2):
        layer = f"model.layers.{i}"
        want.update({f"{layer}.self_attn.{k}_proj.weight": 0 for k in "qkv"})
        want.update({f"{layer}.mlp.{k}_proj.weight": 0 for k in ("gate", "up")})
        want.update({f"{layer}.{k}_proj.weight": 1 for k in ("self_attn.o", "mlp.down")})
    assert layouts(plan) == want
    assert set(plan) == set(plan.why) == {n for n, _ in case("llama").build().named_parameters()}


def test_a_proposal_says_what_it_left_whole_and_why() -> None:
    gpt2 = dt.plans.megatron(case("gpt2").build())
    assert "q, k and v are one matrix" in gpt2.why["transformer.h.0.attn.c_attn.weight"]
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == [Replicate(), Replicate()]
    mixtral = dt.plans.megatron(case("mixtral").build())
    assert "experts" in mixtral.why["model.layers.0.mlp.experts.gate_up_proj"]
