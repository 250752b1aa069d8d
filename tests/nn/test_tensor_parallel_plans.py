"""Plans proposed from a model's structure."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.models.case import Batch, Case, check
from tests.support.models.torch_nn import CASES
from tests.support.pool import fake_world, on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def gpt() -> nn.Module:
    """The model of examples/, which is no package."""
    file = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("examples_gpt", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(module.GPTConfig(vocab=19, layers=2, width=16, heads=4, context=8, tie=True))


def text() -> Batch:
    tokens = torch.randint(19, (4, 7), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


GPT = Case("gpt", gpt, text, cross_entropy)


@pytest.mark.parametrize("case", [GPT, *CASES], ids=str)
@on_ranks(2)
def test_gradients_under_a_proposed_plan(case: Case) -> None:
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    check(case, mesh, dt.plans.megatron(case.model(), "tp", mesh))


@on_ranks(4)
def test_gradients_of_the_example_on_dp_x_tp() -> None:
    mesh = dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))
    log = check(GPT, mesh, dt.plans.megatron(gpt()))
    assert {r.kind for r in log} == {"all_reduce"}, str(log)


def test_the_example_is_split_as_its_own_plan_says() -> None:
    plan = dt.plans.megatron(gpt())
    split = {name for name, placements in plan.items() if placements != [R, R]}
    assert split == {
        "tok.weight",
        "head.weight",
        *(f"blocks.{i}.attn.{k}.{w}" for i in range(2) for k in "qkv" for w in ("weight", "bias")),
        *(f"blocks.{i}.mlp.up.{w}" for i in range(2) for w in ("weight", "bias")),
        *(f"blocks.{i}.{k}.weight" for i in range(2) for k in ("attn.out", "mlp.down")),
    }
    assert plan["blocks.0.attn.out.weight"] == plan["blocks.1.mlp.down.weight"] == [R, S1]
    assert plan["blocks.0.mlp.up.bias"] == [R, S0]


def test_heads_that_the_axis_does_not_divide_stay_whole() -> None:
    with fake_world(6):
        mesh = dt.ProcessMesh([[0, 1, 2], [3, 4, 5]], ("dp", "tp"))
        plan = dt.plans.megatron(gpt(), "tp", mesh)
    assert plan["blocks.0.attn.q.weight"] == plan["blocks.0.attn.out.weight"] == [R, R]
    assert "q has 4 heads, which 3 ranks do not divide" in plan.why["blocks.0.attn.q.weight"]
    assert plan["blocks.0.mlp.up.weight"] == [R, S0]


def test_what_is_not_recognized_is_replicated_and_says_so() -> None:
    plan = dt.plans.megatron(nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5)), mesh_axis=0)
    assert all(placements == [R] for placements in plan.values())
    assert "not recognized" in plan.why["0.weight"] and "not recognized" in str(plan)


def test_layers_that_repeat_print_on_one_line() -> None:
    lines = str(dt.plans.megatron(gpt())).splitlines()
    assert sum("attn.q.weight" in line for line in lines) == 1
    assert any(line.startswith("blocks.*.mlp.down.weight  [R, S(1)]") for line in lines)


def test_a_name_without_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tp'.*megatron\(model, 'tp', mesh\)"):
        dt.plans.megatron(gpt(), "tp")


@pytest.mark.parametrize("name", ["megatron", "Proposal"])
@on_ranks(1)
def test_examples_run(name: str) -> None:
    mesh = dt.init_mesh((1, 1), ("dp", "tp"))
    known = {"torch": torch, "dt": dt, "mesh": mesh}
    text = getattr(dt.plans, name).__doc__
    test = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    report: list[str] = []
    assert test.examples
    doctest.DocTestRunner().run(test, out=report.append)
    assert not report, "".join(report)
