"""Results of modules that their forwards do not return: kept in attributes, containers, closures,
globals, plain tensors, or from one step to the next. A backward through them finds the parameters
gathered (stage 3)."""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import (
    S0,
    STAGES,
    check,
    compare,
    full,
    gradients,
    line,
    values,
    ways,
)

KEPT = deque()


class Slots:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


def returned(t):
    return lambda: t


# How a module keeps a tensor -> how it is found again
WAYS = {
    "an attribute": (lambda t: t, lambda k: k),
    "a dict, not last": (lambda t: {"h": t, "n": 3}, lambda k: k["h"]),
    "a list, not last": (lambda t: [t, None], lambda k: k[0]),
    "nested": (lambda t: [{"a": [(t,)]}], lambda k: k[0]["a"][0][0]),
    "a set": (lambda t: {t}, lambda k: next(iter(k))),
    "an object": (lambda t: SimpleNamespace(h=t), lambda k: k.h),
    "slots": (Slots, lambda k: k.h),
    "a closure": (returned, lambda k: k()),
    "a generator": (lambda t: (x for x in [t]), next),
    "a plain tensor": (lambda t: t.full_tensor() if isinstance(t, dt.DistTensor) else t, None),
}


class Keeps(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.inner, self.keep = nn.Linear(6, 6), keep

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        aux = (h * self.inner.weight[0]).square().sum()
        self.aux = self.keep(aux)
        KEPT.append(self.inner(h).sin().sum())
        KEPT[0] = KEPT[0] + aux * 2
        return h


class Net(nn.Module):
    def __init__(self, keep=lambda t: t):
        super().__init__()
        self.blocks = nn.ModuleList(Keeps(keep) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        KEPT.clear()
        KEPT.append(0)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def found(model, find):
    """What the blocks kept, each as a plain tensor where it was kept as one."""
    return [(find or (lambda k: k))(block.aux) for block in model.blocks]


def whole(t):
    return t.full_tensor() if isinstance(t, dt.DistTensor) else t


def with_the_result(model, x, find):
    loss = whole(model(x).square().sum())
    for t in found(model, find):
        loss = loss + whole(t)
    loss.backward()
    return loss


def alone(model, x, find):
    model(x)
    *_, last = found(model, find)
    last.backward()
    return last


def apart(model, x, find):
    loss = model(x).square().sum()
    first, *_, last = found(model, find)
    last.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    first.backward()
    return loss


def together(model, x, find):
    y = model(x)
    roots = [*found(model, find), y.square().sum()]
    torch.autograd.backward(roots)
    return roots[-1]


def the_globals(model, x, find):
    y = model(x)
    loss = KEPT[0] + KEPT[2] * KEPT[3]
    loss.backward(retain_graph=True)
    y.sum().backward()
    return loss


def of_an_earlier_forward(model, x, find):
    model(x)
    kept = found(model, find)[1], KEPT[1]
    loss = model(x * 2).sum()
    loss.backward()
    for t in kept:
        t.backward(retain_graph=True)
    return loss


def the_inputs_too(model, x, find):
    x = x.detach().requires_grad_()
    y = model(x).sum()
    t = found(model, find)[1]
    y.backward(retain_graph=True)
    t.backward(inputs=[x, model.blocks[0].inner.weight])
    return y + x.grad.square().sum()


STEPS = [
    with_the_result, alone, apart, together, the_globals, of_an_earlier_forward, the_inputs_too
]  # fmt: skip
SEGMENTS = {"each": ["blocks.*"], "parts": ["blocks.*.inner"], "one": dt.fsdp.SegmentBySize()}
CASES = list(itertools.product(WAYS, STEPS, SEGMENTS, STAGES))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_results_that_nobody_returns(way):
    keep, find = WAYS[way]
    for _, step, segments, stage in [c for c in part(CASES, 24, way) if c[0] == way] + [
        (way, with_the_result, "each", 3), (way, alone, "parts", 3)
    ]:  # fmt: skip
        check(
            lambda: Net(keep).double(),
            lambda model, x, step=step: step(model, x, find),
            mesh=line(), segments=SEGMENTS[segments], **ways(stage),
        )  # fmt: skip


class Passes(nn.Module):
    """Reads what the block before it kept, behind the back of the modules."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        if KEPT:
            x = x + KEPT.pop()
        KEPT.append(self.inner(x).sin())
        return self.inner(x).cos().detach() if len(KEPT) > 9 else x.cos()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_later_module_reads_what_an_earlier_one_kept(stage):
    def step(model, x):
        KEPT.clear()
        loss = model(x).sum()
        loss = loss + KEPT.pop().square().sum()
        loss.backward()
        return loss

    def make():
        return nn.Sequential(*(Passes() for _ in range(4))).double()

    check(make, step, mesh=line(), segments=["*"], **ways(stage))


@on_ranks(2)
def test_a_frozen_module_serves_a_graph_of_earlier_steps():
    def run(model, xs):
        for p in model.blocks[1].parameters():
            p.requires_grad_(False)
        scale = xs[0].detach().sum() * 0 + 2
        scale.requires_grad_()
        kept, out = [], []
        for x in xs:
            kept.append(model.blocks[1](x * scale).square().sum())
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad * 0.01) if p.grad is not None else None
            out.append((full(loss), gradients(model)))
        for t in kept:
            t.backward()
        return out, full(scale.grad), values(model)

    def placed(model):
        return dt.shard_data_parallel(model, line(), segments=["blocks.*"])

    torch.manual_seed(0)
    xs = [randn(5, 6, seed=i) for i in range(3)]
    KEPT.append(0)
    want = run(Net().double(), xs)
    torch.manual_seed(0)
    got = run(placed(Net().double()), [dt.shard_tensor(x, line(), [S0]) for x in xs])
    compare(got, want)


@on_ranks(2)
def test_only_segments_in_the_graph_and_around_it_are_gathered():
    model = dt.shard_data_parallel(Net().double(), line(), segments=["blocks.*"])
    x = dt.shard_tensor(randn(5, 6), line(), [S0])
    model(x)
    kept = model.blocks[1].aux
    model(x)  # never differentiated
    with dt.debugging.record_comms() as log:
        kept.backward()
    assert log.counts() == {"all_gather": 3, "reduce_scatter": 3}
