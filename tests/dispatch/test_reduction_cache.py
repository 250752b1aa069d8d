"""A pending sum is reduced once, whatever reads it; and never where its value has changed since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    with dt.debugging.record_comms() as log:
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
    with dt.debugging.record_comms() as log:
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
    with dt.debugging.record_comms() as log:
        gate = x.sigmoid()
        squares = [(x @ w).square().sum() for w in columns]
        (squares[0] + squares[1] + squares[2]).backward()
    assert log.counts("forward") == log.counts("backward") == {"all_reduce": 1}
    sum((y @ w).square().sum() for w in weights).backward()
    torch.testing.assert_close(gate.full_tensor(), y.sigmoid())
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def fused_step(x: torch.Tensor) -> None:
    """A kernel whose writes autograd does not count."""
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([x], [torch.ones_like(x)], [], **options, **flags)


library = torch.library.Library("tests_reduction_cache", "DEF")
library.define("scale_second(Tensor y, Tensor(a!) x) -> Tensor")


def _scale_second(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x.data.mul_(3)
    return y.clone()


library.impl("scale_second", _scale_second, "CompositeExplicitAutograd")

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x.mul_(3),
    "by name": lambda x: torch.relu_(input=x),
    "one row": lambda x: x.__setitem__(0, 3.0),
    "a view": lambda x: x.view(-1).mul_(3),
    "an older view": lambda x: x.older.mul_(3),
    "detach": lambda x: x.detach().mul_(3),
    "data": lambda x: x.data.mul_(3),
    "a view of data": lambda x: x.data.view(-1).mul_(3),
    "data of a view": lambda x: x.view(-1).data.mul_(3),
    "data of detach": lambda x: x.detach().data.detach().mul_(3),
    "new data": lambda x: setattr(x, "data", x.data * 3),
    "a list": lambda x: torch._foreach_mul_([x.data], 3.0),
    "fused": fused_step,
    "fused data": lambda x: fused_step(x.data),
    "out=": lambda x: torch.mul(x, 3, out=x),
    "apply_": lambda x: x.apply_(lambda v: v * 3),
    "custom op": lambda x: torch.ops.tests_reduction_cache.scale_second(x.detach().clone(), x),
}


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_after_a_write_the_new_value_is_read():
    """Also by ranks with no element, and what was kept of split and of replicated tensors."""
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    for name, write in WRITES.items():
        for mode in (torch.no_grad, torch.inference_mode):
            for placement in (P, R, dt.Shard(0)):
                if isinstance(placement, dt.Shard) and "view" in name:
                    continue  # of a split tensor it is a copy, and refuses
                with mode():
                    _, x, _, y = pending(mesh)
                    x = dt.reshard(x, mesh, [placement]).clone()
                    y = y.clone()
                    x.older, y.older = x.view(15), y.view(15)
                    torch.testing.assert_close(x.relu().full_tensor(), y.relu())
                    write(x)
                    write(y)
                    where = f"{name} on {placement} under {mode.__name__}"
                    for f in (torch.neg, torch.sigmoid):
                        torch.testing.assert_close(
                            f(x).full_tensor(), f(y), msg=lambda m, w=where: f"{w}: {m}"
                        )


@on_ranks(2)
def test_after_a_write_a_varying_use_reads_the_new_value():
    """What would be computed once more for it is of the old value then: of what was written to, or
    of what it was made of."""
    mesh = dt.ProcessMesh([0, 1], ("tp",))
    torch.manual_seed(0)
    rows, weight = (torch.randn(*s, dtype=torch.float64) for s in ((5, 3), (3, 4)))
    for name in ("data", "a view of data", "data of a view", "a list", "fused data"):
        for which in (0, 1):
            results = []
            for ours in (True, False):
                leaf = dt.shard_tensor(rows, mesh, [R]) if ours else rows.clone()
                w = dt.shard_tensor(weight, mesh, [dt.Shard(1)]) if ours else weight
                leaf.requires_grad_()
                made = leaf * 1.5
                values = made, made.sigmoid()
                with torch.no_grad():
                    WRITES[name](values[which])
                loss = (values[1] @ w).square().sum()
                loss.backward()
                results.append((loss.detach(), leaf.grad))
            (loss, grad), want = results
            torch.testing.assert_close((loss.full_tensor(), grad.full_tensor()), want, msg=name)


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
