"""What the engine promises and no result of a step shows: how many reductions hold memory at once,
that no stale value is gathered, and which gradients share a bucket."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.fsdp.backward import ReduceOrder
from disttensor.fsdp.engine import _record_gradient as arrived
from disttensor.fsdp.segment import SegmentOptions
from disttensor.fsdp.states import SegmentBackward
from disttensor.gradients.memory import GradMemory, grad_bucket_of
from tests.support.micro import batch_of, meshes, net, shard
from tests.support.pool import on_ranks


class SlowWork:
    """A collective that is not done before somebody waits for it."""

    def __init__(self, under_way: set[Any]) -> None:
        self.under_way = under_way
        under_way.add(self)

    def done(self) -> bool:
        return self not in self.under_way

    def wait(self) -> None:
        self.under_way.discard(self)


class AnySegment:
    copied = True

    def __init__(self, position: int, most: int) -> None:
        self.options = SegmentOptions(most_reductions=most)
        self.position = self.index = position
        self.last = SegmentBackward()
        self.last.arrived.add(0)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("bounded", [True, False])
def test_few_reductions_to_shards_hold_memory_at_once(bounded: bool, most: int) -> None:
    under_way: set[Any] = set()
    at_once = []

    def reduce(segment: Any) -> Any:
        def steps() -> Any:
            work: Any = SlowWork(under_way)
            at_once.append(len(under_way))
            yield work

        return [steps()]

    backward = ReduceOrder(0, reduce, bounded)
    for position in reversed(range(5)):
        segment: Any = AnySegment(position, most)
        backward.record_gradient(segment, 0)
    backward.finish()
    expected = [min(number, most if bounded else 5) for number in range(1, 6)]
    assert at_once == expected and not under_way


def test_a_gradient_that_arrives_settles_in_its_place() -> None:
    """The memory that autograd has allocated is free before the backward ends."""
    leaf, place = torch.zeros(3, requires_grad=True), GradMemory()
    bucket = grad_bucket_of([place], [leaf.shape], [3], leaf, leaf.dtype)
    leaf.grad = torch.ones(3)
    gone: Any = weakref.ref(set())
    arrived(gone, 0, place, leaf)
    assert leaf.grad is bucket.tensors[0] and bucket.flat.tolist() == [1, 1, 1]


@on_ranks(2)
def test_what_was_gathered_before_a_write_is_gathered_again() -> None:
    """As a segment that was gathered ahead, and used after the optimizer's step."""
    model: Any = shard(net(), meshes()["fsdp"])
    for segment in model.__dict__["_data_parallel"].segments:
        segment.start_gather()
        with torch.no_grad():
            for p in segment.params:
                p.sharded_param.add_(1.0)
        segment.finish_gather()
        for p in segment.params:
            want = p.sharded_param.full_tensor()
            torch.testing.assert_close(p.unsharded_param.local, want, rtol=0, atol=0)
        memory = segment.params[0].unsharded_param.local.detach()
        saved = (memory * torch.ones_like(memory, requires_grad=True)).sum()
        segment.free()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


@on_ranks(4)
def test_gradients_of_uneven_pieces_have_a_collective_of_their_own() -> None:
    """Where a gradient lies in a bucket depends on the sizes before it, and in which order a
    backend sums depends on where it lies: replicas with other sizes would get other bits."""
    mesh = dt.ProcessMesh([[0, 1], [2, 3]], ("fsdp", "tp"))
    counts = []
    for hidden in (8, 7):
        model: Any = net(width=4, hidden=hidden)
        dt.shard_module(model, mesh, {"*.up.weight": [dt.Replicate(), dt.Shard(0)]})
        segments = [f"blocks.{i}" for i in range(3)]
        dt.shard_data_parallel(model, shard_axis="fsdp", segments=segments)
        x = dt.shard_tensor(batch_of(None, 1, width=4), mesh, [dt.Shard(0), dt.Replicate()])
        with dt.debugging.record_comms() as comms:
            model(x).sum().backward()
        counts.append(sum(r.kind == "reduce_scatter" for r in comms))
    assert counts == [4, 4 + 3]  # segments; three have a weight of uneven pieces


@on_ranks(4)
def test_a_weight_may_be_used_with_and_without_the_split_of_another_axis() -> None:
    mesh = dt.ProcessMesh([[0, 1], [2, 3]], ("fsdp", "tp"))
    plain = torch.nn.Linear(4, 3, dtype=torch.float64)
    model: Any = copy.deepcopy(plain)
    dt.shard_data_parallel(model, mesh, shard_axis="fsdp")
    x = torch.arange(24, dtype=torch.float64).view(3, 2, 4)
    first, second = [
        dt.shard_tensor(x, mesh, [dt.Shard(0), on_tp]) for on_tp in (dt.Replicate(), dt.Shard(1))
    ]
    for run, a, b in ((plain, x, x), (model, first, second)):
        (run(a).square().sum() + 2 * run(b).sin().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-9)
