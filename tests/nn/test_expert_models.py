"""Mixtures of experts of transformers, unmodified, with their experts split: loss and gradients are
those of one process, the losses that balance a router too, and nothing is gathered."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import Replicate, Shard, pipeline
from disttensor.experts.expert_modules import ExpertsForward, grouped_product, is_experts
from disttensor.parallel.rematerialize import recompute
from tests.support.models.case import Case, check
from tests.support.oracle import randint, randn
from tests.support.pool import on_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.filterwarnings("ignore:.*RoPE"),
]
NAMES = ["mixtral", "mixtral, grouped", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"]


def case(name: str) -> Case:
    """On the ranks only: importing transformers takes seconds."""
    models = importlib.import_module("tests.support.models.huggingface")
    return next(c for c in [*models.CASES, models.GROUPED, *models.MIXTURES] if c.name == name)


def line(axis: str) -> dt.ProcessMesh:
    return dt.ProcessMesh(range(torch.distributed.get_world_size()), (axis,))


def square() -> dt.ProcessMesh:
    return dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=120)
def test_experts_over_the_axis_of_the_batch(name: str) -> None:
    made = case(name)
    plan = dt.plans.experts(made.model(), "dp", line("dp"))
    log = check(made, line("dp"), plan)
    layers = len(plan) // (4 if name == "gpt_oss" else 2)
    assert log.counts("forward")["all_to_all"] == log.counts("backward")["all_to_all"] == 2 * layers
    assert log.counts("forward")["all_gather"] == layers
    check(made, line("dp"), plan, stage=3)


@on_ranks(2, timeout=120)
def test_a_balance_that_leaves_padding_out() -> None:
    models, made = importlib.import_module("tests.support.models.huggingface"), case("qwen2_moe")
    plan = dt.plans.experts(made.model(), "dp", line("dp"))
    check(dataclasses.replace(made, batch=models.padded), line("dp"), plan)


@pytest.mark.parametrize("name", NAMES[2:])
@on_ranks(2, timeout=120)
def test_the_proposed_plan(name: str) -> None:
    made = case(name)
    check(made, line("tp"), dt.plans.megatron(made.model(), "tp", line("tp")))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@on_ranks(4, timeout=120)
def test_on_dp_x_tp(name: str) -> None:
    made = case(name)
    plan: dict[str, Any] = dt.plans.megatron(made.model(), "tp", square())
    check(made, square(), plan)
    for axes in ("dp", ["dp", "tp"]):
        check(made, square(), plan | dt.plans.experts(made.model(), axes, square()))


def run_layers(model: Any, ids: Any) -> Any:
    return model(input_ids=ids).logits.double().square().mean()


@on_ranks(4, timeout=120)
def test_in_stages_and_computed_again() -> None:
    stages = [dt.ProcessMesh(ranks, ("dp",)) for ranks in ([0, 1], [2, 3])]
    made = case("qwen3_moe")
    plain, mine = made.model(), made.model()
    for m in (plain, mine):
        m.config.output_router_logits = False  # their loss would join tensors of both stages
        m.set_experts_implementation("eager")
    ids = made.batch()["input_ids"]
    run_layers(plain, ids).backward()
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.*", "model.norm", "lm_head"]
    pipeline.split(names, stages, dt.plans.experts(mine, 0), of=mine)
    for layer in mine.model.layers:
        recompute(layer, [layer.mlp.experts])
    run_layers(mine, dt.shard_tensor(ids, stages[0], [Shard(0)])).backward()
    for (name, p), (_, q) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        grad = None if p.grad is None else p.grad.full_tensor()
        assert (grad is None) == (not p.is_initialized), name
        if grad is not None:
            torch.testing.assert_close(grad, q.grad, rtol=1e-5, atol=1e-7)
    load = dt.experts.expert_load(mine)
    assert [layer.name for layer in load] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(sum(layer.experts) == ids.numel() * 2 and len(layer.parts) == 2 for layer in load)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
@on_ranks(2, timeout=120)
def test_a_module_of_experts_is_exact(name: str) -> None:
    model = case(name).model()
    plain = next(m for m in model.modules() if is_experts(m))
    mine, mesh = copy.deepcopy(plain), line("ep")
    dt.shard_module(mine, mesh, dt.plans.experts(mine, "ep", mesh))
    assert isinstance(mine.forward, ExpertsForward)
    width = plain.down_proj.shape[2 if plain.is_transposed else 1]
    x, weights = randn(7, width), randn(7, 2, seed=1)
    chosen = randint(0, 2, (7, 2)) * 2 + torch.tensor([0, 1])
    plain(x, chosen, weights).square().sum().backward()
    split = [dt.shard_tensor(t, mesh, [Shard(0)]) for t in (x, chosen, weights)]
    out = copy.deepcopy(mine)(*split)
    torch.testing.assert_close(out.full_tensor(), plain(x, chosen, weights), rtol=1e-12, atol=1e-12)
    mine(*split).square().sum().backward()
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10)


@on_ranks(2, timeout=120)
def test_autocast() -> None:
    made = case("mixtral, grouped")
    plain, mine, mesh = made.model(), made.model(), line("dp")
    plain.set_experts_implementation("eager")
    dt.shard_module(mine, mesh, dt.plans.experts(mine, "dp", mesh))
    split = {k: dt.shard_tensor(v, mesh, [Shard(0)]) for k, v in made.batch().items()}
    with torch.autocast("cpu", torch.bfloat16):
        want, got = made.loss(plain, made.batch()), made.loss(mine, split)
    want.backward()
    got.backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=5e-3, atol=5e-3)
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad.dtype == q.grad.dtype
            far = (p.grad.full_tensor() - q.grad).norm() / q.grad.norm().clamp(min=1e-6)
            assert far < 0.1


@pytest.mark.parametrize("turned", [False, True])
def test_grouped_product(turned: bool) -> None:
    counts = [2, 0, 3]
    rows, weight = randn(5, 4), randn(3, *((6, 4) if turned else (4, 6)), seed=1)
    leaves = rows.requires_grad_(), weight.requires_grad_()
    out = grouped_product(rows, weight, counts, turned)
    each = zip(rows.split(counts), weight.mT if turned else weight, strict=True)
    torch.testing.assert_close(out, torch.cat([r @ w for r, w in each]))
    assert torch.autograd.gradcheck(grouped_product, (*leaves, counts, turned))
    assert torch.autograd.gradgradcheck(grouped_product, (*leaves, counts, turned))


def test_plans() -> None:
    model = case("qwen2_moe").build()
    mesh = dt.ProcessMesh([[0]], ("dp", "tp"))
    plan = dt.plans.experts(model, ["dp", "tp"], mesh)
    assert len(plan) == 4 and all(p == [Shard(0), Shard(0)] for p in plan.values())
    assert set(plan.why.values()) == {"experts: by number"}
    megatron = dt.plans.megatron(model, 1)
    assert all(megatron[name] == [Replicate(), Shard(0)] for name in plan)
    assert next(iter(dt.plans.experts(model, 0).values())) == [Shard(0)]


@on_ranks(4)
def test_fewer_experts_than_ranks():
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model["experts"].up = torch.nn.Parameter(torch.ones(3, 2, 2))
    with pytest.raises(ValueError, match=r"experts\.up has 3 experts for 4 ranks"):
        dt.plans.experts(model, "ep", line("ep"))
    plan = dt.plans.megatron(model, "ep", line("ep"))
    assert plan["experts.up"] == [Replicate()]
    assert plan.why["experts.up"] == "experts: 3, which are fewer than 4 ranks"


def test_what_is_no_mixture() -> None:
    assert not any(map(is_experts, case("llama").build().modules()))
    with pytest.raises(ValueError, match="no module of this LlamaForCausalLM holds experts"):
        dt.plans.experts(case("llama").build(), 0)
