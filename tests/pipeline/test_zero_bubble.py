"""Schedules with I and W carried out: bit for bit the gradients of 1f1b, whatever the layers are;
what was put off, and what is kept until then."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import errors, pipeline
from disttensor.pipeline.micro_batch_graph import MicroBatchGraph, VisitGraph
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")


class Block(nn.Module):
    """[rows, 6] -> the same: a norm, two products, a residual, a leaf that is used twice."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.again = again

    def body(self, x):
        h = torch.softmax(self.up(self.norm(x)), -1)
        return self.scale * (x + self.down(h)) * self.scale

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


class Model(nn.Module):
    def __init__(self, depth: int, again: bool = False, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(again and i % 2 == 0) for i in range(depth))
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(schedule, visits, count=5, plan=None, autocast=False, **how):
    """(losses, gradients by name, recorded events) of one step."""
    torch.manual_seed(0)
    depth = max(2, len(visits) - 2)
    model = Model(depth, **how).double()
    layers = ["embed", "blocks.*", "head"]
    pipeline.split(layers, visits, plan, of=model)
    tokens = torch.randint(11, (3 * count + 2, 5), generator=torch.Generator().manual_seed(1))

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(dt.shard_tensor(batch, visits[0]))
            return y.double().square().sum() / 10

    several = len(set(visits)) < len(visits)
    with pipeline.record() as recorded:
        losses = pipeline.run(
            step, tokens.tensor_split(count), schedule, stages=visits if several else None
        )
    grads = {
        name: None if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }
    values = [dt.broadcast_value(loss) for loss in losses]
    return values, grads, [e for e in recorded.events if e.kind != "wait"]


def visits_of(meshes, schedule):
    if schedule in ("zbv", "dualpipev"):
        return [*meshes, *reversed(meshes)]
    return meshes * 2 if schedule.startswith("interleaved") else meshes


def like(schedule, visits):
    """A schedule without W over the same visits, which adds gradients up in the same order."""
    if schedule == "zero_bubble":
        return "1f1b"
    made = pipeline.named(schedule, len(set(visits)), 5, 2)
    rows = [[a._replace(kind="B" if a.kind == "I" else a.kind) for a in row if a.kind != "W"]
            for row in made.orders]  # fmt: skip
    return pipeline.Schedule(rows, made.shape)


def check(schedule, meshes, **how):
    visits = visits_of(meshes, schedule)
    losses, grads, events = trained(schedule, visits, **how)
    want, expected, _ = trained(like(schedule, visits), visits, **how)
    assert all(map(torch.equal, losses, want))
    for name, grad in expected.items():
        assert (grads[name] is None) is (grad is None), name
        assert grad is None or torch.equal(grads[name], grad), name
    row = pipeline.named(schedule, len(meshes), 5, len(visits) // len(meshes)).orders
    done = [e.action for e in events]
    if "again" in how or "tie" in how:  # a visit may have nothing to put off
        done, row = (
            [a for a in done if a.kind == "F"],
            [[a for a in r if a.kind == "F"] for r in row],
        )
    assert done == list(row[events[-1].stage])
    return events


SCHEDULES = ["zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev"]
HOW = [{}, {"tie": True}, {"again": True}, {"autocast": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_bit_for_bit(schedule, how):
    check(schedule, stage_meshes(), **how)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_bit_for_bit_on_four_stages(schedule):
    check(schedule, stage_meshes(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_split_over_the_ranks_of_a_stage(schedule):
    plan = {"*.up.*": [dt.Shard(0)], "*.down.weight": [dt.Shard(1)], "*.norm.*": [dt.Shard(0)]}
    check(schedule, stage_meshes(), plan=plan, tie=True)


@on_ranks(2)
def test_what_is_not_put_off_is_said_once():
    stages = stage_meshes()
    errors.warned.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            trained("interleaved_zero_bubble", stages * 2, tie=True, again=True)
    (text,) = [str(w.message) for w in said if w.category is dt.errors.FallbackWarning]
    if stages[0].coordinate is not None:
        assert "stage 0" in text and "blocks.1.scale: used more than once" in text
    else:
        assert "stage 1" in text and "computed again" in text
        assert "blocks.0.down.bias, blocks.0.down.weight" in text


@on_ranks(2)
def test_weights_of_a_stage_that_leaves_for_a_mesh_of_its_ranks_and_comes_back():
    """The graph counts three visits, and each has put off a gradient."""
    first, last = stage_meshes()
    aside = dt.ProcessMesh(last.ranks, ("other",))

    def gradients(schedule):
        torch.manual_seed(0)
        w = [dt.randn(6, 6, mesh=m, requires_grad=True) for m in (first, last, aside, last)]

        def step(x):
            for weight in w:
                x = dt.reshard(x, weight.process_mesh, [dt.Replicate()]) @ weight
            return x.square().sum()

        batches = [dt.randn(2, 6, mesh=first) for _ in range(2)]
        with pipeline.record() as recorded:
            pipeline.run(step, batches, schedule, stages=[first, last])
        kinds = {e.kind for e in recorded.events}
        assert ("W" in kinds) == (schedule == "zero_bubble" and last.coordinate is not None)
        return [weight.grad.to_local() for weight in w if weight.is_initialized]

    assert all(map(torch.equal, gradients("zero_bubble"), gradients("1f1b")))


def test_the_weights_of_the_visits_that_are_named_alone():
    graph, done = MicroBatchGraph(list), list[int]()
    graph.visits = [VisitGraph() for _ in range(4)]
    for number, visit in enumerate(graph.visits):
        split: Any = SimpleNamespace(weights=partial(done.append, number))
        visit.split = split
    assert graph.backward_weight(1, 2) and done == [2, 1]
    assert graph.backward_weight(0, 3) and done == [2, 1, 3, 0]
    assert not graph.backward_weight(0, 3) and done == [2, 1, 3, 0]
