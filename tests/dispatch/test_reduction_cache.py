"""A pending sum is reduced once, whatever reads it; and never where its value has changed since."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from tests.support.layouts import P, R, counted
from tests.support.pool import on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes


def pending(
    mesh: dt.ProcessMesh,
) -> tuple[dt.DistTensor, dt.DistTensor, torch.Tensor, torch.Tensor]:
    """(leaf, its double pending over the axis; leaf and double of one process)"""
    torch.manual_seed(2)
    plain = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    leaf = dt.shard_tensor(plain.detach(), mesh, [R], requires_grad=True)
    return leaf, dt.reshard(leaf, mesh, [P]) * 2, plain, plain * 2


def twice(x: torch.Tensor) -> torch.Tensor:
    """Two functions that need the sum, one that does not, and one that reads it varying."""
    return x.sigmoid() + x.exp() * x.relu() + x * 0.5


@on_ranks(2)
def test_two_functions_reduce_once():
    leaf, x, plain, y = pending(dt.ProcessMesh([0, 1], ("tp",)))
    with dt.record_comms() as log:
        out = twice(x)
        out.square().sum().backward()
    assert log.counts() == {"all_reduce": 1}
    assert x.placements == (P,)  # as it was
    want = twice(y)
    want.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_sums_of_pending_values_stay_pending():
    """GPT-J's block: one all-reduce for the sum of three, though the first has been reduced."""
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    _, x, _, y = pending(mesh)
    with dt.record_comms() as log:
        norm = x.sigmoid()
        out = (x + dt.reshard(norm, mesh, [P]) + dt.reshard(norm, mesh, [P])).relu()
    assert log.counts() == {"all_reduce": 2}
    torch.testing.assert_close(out.full_tensor(), (y + 2 * y.sigmoid()).relu())


@on_ranks(2)
def test_varying_readers_share_one_all_reduce_each_way():
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    leaf, x, plain, y = pending(mesh)
    weights = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    columns = [dt.shard_tensor(w, mesh, [dt.Shard(1)]) for w in weights]
    with dt.record_comms() as log:
        gate = x.sigmoid()
        squares = [(x @ w).square().sum() for w in columns]
        (squares[0] + squares[1] + squares[2]).backward()
    assert log.counts("forward") == log.counts("backward") == {"all_reduce": 1}
    sum((y @ w).square().sum() for w in weights).backward()
    torch.testing.assert_close(gate.full_tensor(), y.sigmoid())
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def through_itself(x: torch.Tensor) -> None:
    x.mul_(3)


def through_a_view(x: torch.Tensor) -> None:
    x.view(-1).mul_(3)


def through_an_older_view(x: torch.Tensor) -> None:
    x.older.mul_(3)


@pytest.mark.parametrize("write", [through_itself, through_a_view, through_an_older_view])
@on_ranks(2)
def test_after_a_write_the_new_value_is_read(write):
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    with torch.no_grad():
        _, x, _, y = pending(mesh)
        x.older, y.older = x.view(15), y.view(15)
        torch.testing.assert_close(x.relu().full_tensor(), y.relu())
        write(x)
        write(y)
        torch.testing.assert_close((x * 2).full_tensor(), y * 2)
        torch.testing.assert_close(x.sigmoid().full_tensor(), y.sigmoid())


@on_ranks(2)
def test_a_reduction_without_grad_is_not_read_with_grad():
    leaf, x, plain, y = pending(dt.ProcessMesh([0, 1], ("tp",)))
    with torch.no_grad():
        x.relu()
    x.exp().sum().backward()
    y.exp().sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("before", [False, True])
@on_ranks(2)
def test_a_recomputed_region_makes_the_calls_of_its_forward(before):
    """The first product of the region reads x pending; its second function reduces x."""
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    scale = torch.randn(3, dtype=torch.float64)
    ours = dt.shard_tensor(scale, mesh, [R], requires_grad=True)
    theirs = scale.clone().requires_grad_()

    def region(x, s):
        return x * s + x.sigmoid()

    leaf, x, plain, y = pending(mesh)
    for value, s in ((x, ours), (y, theirs)):
        extra = value.exp().sum() if before else 0
        out = checkpoint(region, value, s, use_reentrant=False)
        extra = extra + value.tanh().sum()
        (out.square().sum() + extra).backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(4)
def test_ranks_outside_take_the_same_decisions():
    """x * 2 is pending before x was reduced, and not after; written to, it is pending again."""
    seen = []

    def program(on: Stages) -> torch.Tensor:
        leaf = on.leaf(counted(5, 3) / 8, 0)
        x = leaf * 2
        if on.meshes is not None:
            x = dt.reshard(leaf, on.mesh(0), [P]) * 2
        results = [x * 2, x.sigmoid(), x * 3]
        x += 1
        results += [x * 4, on.to(x.exp(), 1).sigmoid(), x * 5]
        if on.meshes is not None:
            seen.extend(r.placements for r in results)
        return on.to(sum(r.sum() for r in results[:-2]), 1) + results[-2].sum()

    check_stages(program, stage_meshes())
    assert seen == [(P,), (R,), (R,), (P,), (R,), (R,)]
