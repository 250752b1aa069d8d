"""Modules that run without a forward of the root: a method that is not forward (encode, generate)
calls some of them, or a program does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.micro import batch_of, meshes
from tests.support.pool import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.one, self.two, self.three = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.three(self.two(self.one(x * self.scale)))

    def encode(self, x: Any) -> Any:
        return self.one(x * self.scale)

    def twice(self, x: Any) -> Any:
        return self.two(torch.tanh(self.one(x * self.scale)))


SEGMENTS: list[Any] = [
    dt.fsdp.SegmentBySize(0.0005),  # two linears each
    dt.fsdp.SegmentByAnchors(["one", "three"]),
    ["*"],
    None,
]
ORDERS = [["encode"], ["twice"], ["forward", "encode"], ["encode", "forward", "twice"]]


@pytest.mark.parametrize("stage", [1, 2, 3, None])
@on_ranks(2, timeout=200)
def test_a_method_runs_some_modules_of_a_segment(stage: int | None) -> None:
    """The rest of the segment does not run: gradients are right, and the modules hold shards."""
    mesh = meshes()["fsdp"]
    torch.manual_seed(0)
    start = Model().double()
    how: dict[str, Any] = {"shard_axis": None} if stage is None else {"stage": stage}
    for segments in SEGMENTS:
        for order in ORDERS:
            plain = copy.deepcopy(start)
            model = dt.shard_data_parallel(copy.deepcopy(start), mesh, segments=segments, **how)
            shards = list(model.parameters())
            for m, on in ((plain, None), (model, mesh)):
                sgd = torch.optim.SGD(m.parameters(), lr=0.1)
                for step in range(2):
                    for name in order:
                        getattr(m, name)(batch_of(on, step)).square().sum().backward()
                    if step == 0:
                        sgd.step()
                        sgd.zero_grad()
            assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
            found = [
                [None if p.grad is None else getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
                 for p in m.parameters()]
                for m in (model, plain)
            ]  # fmt: skip
            torch.testing.assert_close(*found, msg=lambda m: f"{segments} {order}: {m}")


@on_ranks(4, timeout=200)
def test_parts_on_the_meshes_of_stages() -> None:
    """Ranks outside a mesh know the layouts of the results."""
    stages = [dt.ProcessMesh(ranks, ("fsdp",)) for ranks in ([0, 1], [2, 3])]
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    for name, mesh in (("one", 0), ("two", 0), ("three", 1)):
        dt.shard_module(getattr(model, name), stages[mesh])
    del model.scale
    dt.shard_data_parallel(model, segments=dt.fsdp.SegmentByAnchors(["one", "three"]))
    shards = list(model.parameters())
    for _ in range(2):
        x = batch_of(None, 0)
        y = torch.tanh(plain.one(x))
        plain.three(plain.one(y)).square().sum().backward()
        hidden = torch.tanh(model.one(dt.shard_tensor(x, stages[0], [dt.Shard(0)])))
        hidden = model.one(hidden)
        model.three(dt.reshard(hidden, stages[1], [dt.Shard(0)])).square().sum().backward()
    for name in ("one", "two", "three"):
        for p, q in zip(
            getattr(model, name).parameters(), getattr(plain, name).parameters(), strict=True
        ):
            if p.is_initialized and q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))


class CallsItself(Model):
    def forward(self, x: Any, mesh: Any = None, inner: bool = False) -> Any:
        """Calls itself with ``inner`` first. The outer forward then reads the parameters of ``two``
        while the segment of ``one`` and ``two`` is shown, and does not call ``two``."""
        if inner:
            return self.one(x)
        x = self.one(torch.tanh(self(x, inner=True)))
        x = torch.nn.functional.linear(x, self.two.weight, self.two.bias)
        return self.three(x if mesh is None else dt.reshard(x, mesh, [dt.Shard(0)]))


@on_ranks(4, timeout=200)
def test_a_root_that_calls_itself_on_the_meshes_of_stages() -> None:
    """Ranks outside of a mesh show the same parameters between two modules as its own ranks."""
    stages = [dt.ProcessMesh(ranks, ("fsdp",)) for ranks in ([0, 1], [2, 3])]
    torch.manual_seed(0)
    plain = CallsItself().double()
    model = copy.deepcopy(plain)
    for name, mesh in (("one", 0), ("two", 0), ("three", 1)):
        dt.shard_module(getattr(model, name), stages[mesh])
    del model.scale
    dt.shard_data_parallel(model, segments=dt.fsdp.SegmentByAnchors(["one", "three"]))
    x = batch_of(None, 0)
    y = model(dt.shard_tensor(x, stages[0], [dt.Shard(0)]), stages[1])
    torch.testing.assert_close(dt.broadcast_value(y.detach()), plain(x).detach())
