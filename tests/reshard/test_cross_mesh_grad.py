"""reshard to another mesh is differentiable, for any two layouts of any two meshes."""

from __future__ import annotations

import random

import pytest
import torch

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.oracle import layouts_of, place, randn
from tests.support.pool import fake_world, on_ranks

MESHES = {
    "apart": ([0, 1], [2, 3]),
    "overlapping": ([0, 1, 2], [2, 3]),
    "in another order": ([0, 1], [1, 0]),
    "into itself": ([[0, 1], [2, 3]], [3, 1, 0, 2]),
    "one to many": ([3], [[0, 1], [2, 3]]),
    "many to one": ([[0, 2], [1, 3]], [1]),
    "to more axes": ([0, 1], [[[2], [3]]]),
    "to the whole": ([1, 2], [[0, 1], [2, 3]]),
}
SHAPES = [(5, 3), (1, 7), (), (0, 4)]


def mesh_of(ranks):
    array = torch.tensor(ranks)
    return ProcessMesh(array, ("a", "b", "c")[: array.ndim])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", MESHES)
@on_ranks(4)
def test_values_and_gradients(kind, seed):
    a, b = map(mesh_of, MESHES[kind])
    draw = random.Random(f"{kind}{seed}")
    for shape in SHAPES:
        full, weight = randn(*shape), randn(*shape, seed=1)
        for way in ("leaf", "product", "used twice"):
            src = draw.choice(layouts_of(full, a.ndim))
            dst = draw.choice(layouts_of(full, b.ndim))
            x = place(full, a, src).requires_grad_()
            y = dt.reshard(x if way == "leaf" else x * 2, b, dst)
            expected = full if way == "leaf" else full * 2
            factor = 1 if way == "leaf" else 2
            total = (y * dt.shard_tensor(weight, b)).sum()
            if (
                way == "used twice"
            ):  # by consumers that vary over the axes of the target, and others
                total = total + y.sum() * 3
                expected_grad = factor * (weight + 3)
            else:
                expected_grad = factor * weight
            total.backward()
            value = y.detach().full_tensor(everywhere=True)
            where = f"{shape} {way}: {src} on {a} -> {dst} on {b}"
            assert y.placements == tuple(dst) and y.requires_grad, where
            torch.testing.assert_close(value, expected, msg=where)
            if x.is_initialized:
                torch.testing.assert_close(x.grad.full_tensor(), expected_grad, msg=where)
            else:
                assert x.grad is None


@on_ranks(4)
def test_what_is_asked_for_by_name():
    """torch.autograd.grad and backward(inputs=): every transfer on the way runs, on all ranks."""
    a, b = ProcessMesh([0, 1], ("x",)), ProcessMesh([2, 3], ("x",))
    x = dt.shard_tensor(randn(5, 3), a, [Shard(0)], requires_grad=True)
    w = dt.shard_tensor(randn(5, 3, seed=1), b, [Shard(1)], requires_grad=True)
    for wanted in ([x], [w], [x, w]):
        loss = (dt.reshard(x * 2, b, [Shard(0)]) * w).sum()
        grads = torch.autograd.grad(loss, wanted)
        for t, g in zip(wanted, grads, strict=True):
            assert g.shape == t.shape and g.process_mesh is t.process_mesh
            other = randn(5, 3, seed=1) if t is x else randn(5, 3)
            if t.is_initialized:
                torch.testing.assert_close(g.full_tensor(), 2 * other)
        loss = (dt.reshard(x * 2, b, [Shard(0)]) * w).sum()
        loss.backward(inputs=wanted)
        assert [t.grad is not None for t in (x, w)] == [
            t.is_initialized and any(t is one for one in wanted) for t in (x, w)
        ]
        x.grad = w.grad = None


@on_ranks(4)
def test_several_losses_and_a_kept_graph():
    a, b = ProcessMesh([0, 1], ("x",)), ProcessMesh([2, 3], ("x",))
    x = dt.shard_tensor(randn(5, 3), a, [Shard(0)], requires_grad=True)
    y = dt.reshard(x * 2, b, [Shard(1)])
    one, two = (y * 3).sum(), y.square().sum()
    one.backward(retain_graph=True)
    two.backward(retain_graph=True)
    two.backward()
    again = dt.reshard(x, b)
    torch.autograd.backward([again.sum(), (again * 2).sum()])
    if x.is_initialized:
        torch.testing.assert_close(x.grad.full_tensor(), 6 + 2 * 8 * randn(5, 3) + 3)


@on_ranks(2)
def test_differentiating_twice_by_way_of_grad_is_refused_across_meshes():
    a, b = ProcessMesh([0], ("x",)), ProcessMesh([1], ("x",))
    x = dt.shard_tensor(randn(3), a, requires_grad=True)
    y = dt.reshard(x, b).square().sum()
    with pytest.raises(NotImplementedError, match=r"Use torch\.autograd\.grad"):
        y.backward(create_graph=True)


@on_ranks(2)
def test_nothing_is_shared_and_nothing_needed_is_sent():
    """The copy is a copy; without grad no gradient moves; a move to where all is, moves nothing."""
    a, b = ProcessMesh([0, 1], ("x",)), ProcessMesh([1, 0], ("x",))
    x = dt.shard_tensor(randn(4, 3), a)
    with dt.debugging.record_comms() as comms:
        y = dt.reshard(x, b)
    assert comms.total_bytes == 0
    y.zero_()
    torch.testing.assert_close(x.full_tensor(), randn(4, 3))
    w = dt.shard_tensor(randn(4, 3), a, [Shard(0)], requires_grad=True)
    loss = dt.reshard(w, b, [Shard(0)]).sum()
    with dt.debugging.record_comms() as comms:
        loss.backward()
    assert comms.total_bytes == 2 * 3 * 8


def test_a_large_world():
    """64 ranks, eight stages of eight: a rank runs forward and backward of all of them."""
    for rank in (0, 27, 63):
        with fake_world(64, rank):
            stages = [
                ProcessMesh(torch.arange(8 * s, 8 * s + 8).view(2, 4), ("dp", "tp"))
                for s in range(8)
            ]
            x = dt.zeros(16, 32, mesh=stages[0], placements=[Shard(0), Replicate()])
            weights = []
            for stage in stages:
                x = dt.reshard(x, stage, [Shard(0), Replicate()])
                w = dt.zeros(32, 32, mesh=stage, placements=[Replicate(), Shard(0)])
                weights.append(w.requires_grad_())
                x = torch.relu(x @ w.t())
                assert x.dims_mapping == [0, 1]
            x.sum().backward()
            mine = [w.grad for w in weights if w.is_initialized]
            assert len(mine) == 1 and mine[0].placements == (Partial("sum"), Shard(0))
            assert [w.is_initialized for w in weights].index(True) == rank // 8
