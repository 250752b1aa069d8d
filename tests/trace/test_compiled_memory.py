"""Compiled programs that write: buffers that a forward moves and uses, arguments that share
memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.pool import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")


def _moved(m, x):
    m.b.mul_(0.5).add_(1.0)
    return (x * m.w * m.b).exp() * m.b


def _averaged(m, x):
    with torch.no_grad():
        m.b.lerp_(x.detach().mean(), 0.1)
    return torch.tanh(x * m.w - m.b) * m.b


def _copied(m, x):
    m.b.copy_(x.detach().mean())
    return torch.sin(m.w * m.b)


def _through_a_view(m, x):
    m.b.view(2, 2).add_(1.0)
    return torch.sin(x * m.w * m.b)


def _of_another(m, x):
    m.b.copy_(x.detach().mean())
    return torch.sin(x * m.w)


# Whether the program is compiled: not if a gradient may need what was written.
WRITES = {
    _moved: False,
    _averaged: False,
    _copied: False,
    _through_a_view: False,
    _of_another: True,
}


class Moves(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.w, self.way = nn.Parameter(torch.full((4,), 2.0)), way
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        return self.way(self, x)


def _steps(way, compiled):
    mesh = dt.init_mesh((2,), ("x",))
    model = dt.shard_module(Moves(way), mesh)
    model = dt.compile(model, backend="aot_eager") if compiled else model
    seen = []
    for i in range(3):
        x = dt.shard_tensor(torch.linspace(0.1, 0.6, 12).view(3, 4) * (i + 1), mesh, [Shard(0)])
        x.requires_grad_()
        loss = model(x).sum()
        loss.backward()
        values = (loss, model.w.grad, x.grad, model.b)
        seen.append([None if v is None else v.full_tensor() for v in values])
        model.w.grad = None
    return seen, model


@on_ranks(2)
@pytest.mark.parametrize("way", WRITES)
def test_a_buffer_that_a_forward_moves(way):
    plain, _ = _steps(way, False)
    found, model = _steps(way, True)
    for mine, theirs in zip(found, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None) and (a is None or a.equal(b))
    assert (model.forward.replays > 0) is WRITES[way], model.forward.why()


def _written(a, b):
    a.mul_(2.0)
    return a + b


@on_ranks(1)
@pytest.mark.parametrize("first", ["apart", "overlapping"])
def test_arguments_that_share_memory(first):
    mesh = dt.init_mesh((1,), ("x",))

    def given(apart, wrapped):
        base = torch.arange(6.0)
        pair = base[:4], (base.clone() if apart else base)[2:]
        if wrapped:
            pair = tuple(dt.from_local(t, mesh, [Replicate()]) for t in pair)
        return pair

    for wrapped in (False, True):
        compiled = dt.compile(_written, backend="aot_eager")
        for apart in (first == "apart",) * 3 + (first != "apart",) * 3:
            assert compiled(*given(apart, wrapped)).equal(_written(*given(apart, wrapped)))
