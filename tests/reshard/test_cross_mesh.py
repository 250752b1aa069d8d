"""Tensors that go from one mesh to another, on real ranks: values, bytes, and who is left out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
import reshard
from disttensor import ProcessMesh
from disttensor.comm import collectives, p2p
from disttensor.comm.process_group import world
from reshard import cross_mesh
from reshard.registry import moves
from tests.support.pool import on_ranks
from tests.support.reshard_cases import P, R, S, layouts, locals_of, spec, value, value_of, window

# Pairs of meshes on four ranks, and what they stand for.
MESHES = {
    "stages": ([0, 1], [2, 3]),
    "back": ([2, 3], [0, 1]),
    "overlapping": ([0, 1, 2], [1, 3]),
    "reordered": ([0, 1, 2, 3], [3, 1, 0, 2]),
    "one to many": ([2], [0, 1, 2, 3]),
    "many to one": ([0, 1, 2, 3], [1]),
    "more axes": ([3, 0], [[0, 1], [2, 3]]),
    "fewer axes": ([[0, 1], [2, 3]], [0, 1, 3]),
    "transposed": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "columns": ([[0], [1]], [[2], [3]]),
}


def mesh(ranks):
    return ProcessMesh(ranks, ("dp", "tp")[: torch.tensor(ranks).ndim])


def some(seed, n, ndim, left, right, ops=("sum", "max", "avg")):
    rnd = random.Random(seed)
    pairs = [(rnd.choice(layouts(ndim, left, ops)), rnd.choice(layouts(ndim, right, ops)))]
    while len(pairs) < n:
        pairs.append((rnd.choice(layouts(ndim, left, ops)), rnd.choice(layouts(ndim, right, ops))))
    return pairs


def local_of(s, whole):
    """This rank's local, or the empty one of a rank outside."""
    if s.mesh.coordinate is None:
        return torch.empty(s.local_shape, dtype=whole.dtype)
    return locals_of(s, whole)[s.mesh.coordinate]


def check(src, dst, whole):
    """Run src -> dst on all ranks; rank 0's word for all, put together from the locals of dst."""
    x = local_of(src, whole)
    before = x.clone()
    with dt.debugging.record_comms() as log:
        out = reshard.run(x, src, dst)
    assert torch.equal(x, before) and out.dtype == whole.dtype
    locals_: list = [None] * dist.get_world_size()
    dist.all_gather_object(locals_, (out, sum(r.bytes for r in log if r.kind == "send")))
    if dst.mesh.coordinate is None:
        assert out.numel() == 0
    got = {c: locals_[r][0] for r, c in zip(dst.mesh.ranks, dst.mesh.coordinates(), strict=True)}
    for place, part in value_of(dst, got).items():
        want = window(whole, dst.box_at(place))
        assert part.shape == want.shape and torch.equal(part, want), (
            f"{src!r} -> {dst!r} at {place}"
        )
    return sum(n for _, n in locals_)


@pytest.mark.parametrize("name", MESHES)
@on_ranks(4)
def test_every_pair_of_meshes(name):
    a, b = map(mesh, MESHES[name])
    for shape in [(5, 3), (8, 4), (1, 3), (0, 2)]:
        for left, right in some(f"{name} {shape}", 12, 2, a.ndim, b.ndim):
            src, dst = spec(a, left, shape), spec(b, right, shape)
            sent = check(src, dst, value(shape))
            assert sent == cross_mesh.plan_between(src, dst).nbytes


@on_ranks(4)
def test_stages_of_equal_layout_send_each_piece_once():
    a, b = mesh([0, 1]), mesh([2, 3])
    for layout in ([S(0)], [S(1)]):
        src, dst = spec(a, layout, (6, 4)), spec(b, layout, (6, 4))
        assert check(src, dst, value((6, 4))) == 6 * 4 * 4
    assert check(spec(a, [R], (6, 4)), spec(b, [S(0)], (6, 4)), value((6, 4))) == 6 * 4 * 4
    assert check(spec(a, [S(0)], (6, 4)), spec(b, [R], (6, 4)), value((6, 4))) == 2 * 6 * 4 * 4


@on_ranks(4)
def test_dtypes_and_scalars():
    a, b = mesh([0, 3]), mesh([1, 2])
    for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.complex64, torch.uint8):
        for left, right in [([S(0)], [S(1)]), ([R], [S(0)])]:
            check(spec(a, left, (5, 3), dtype), spec(b, right, (5, 3), dtype), value((5, 3), dtype))
        check(spec(a, [R], (), dtype), spec(b, [R], (), dtype), value((), dtype))
    check(spec(a, [P()], ()), spec(b, [R], ()), value(()))
    for left, right in [(P("any"), R), (P("all"), P("all")), (S(0), P("any")), (P("max"), S(0))]:
        check(
            spec(a, [left], (5,), torch.bool),
            spec(b, [right], (5,), torch.bool),
            value((5,), torch.bool),
        )


@on_ranks(4)
def test_to_and_from_parts_of_a_mesh():
    whole = mesh([[0, 1], [2, 3]])
    for part in (whole[0], whole[:, 1], mesh([3])):
        for left, right in some(str(part), 12, 2, 2, 1):
            src, dst = spec(whole, left, (5, 3)), spec(part, right, (5, 3))
            check(src, dst, value((5, 3)))
            check(dst, src, value((5, 3)))


@on_ranks(4)
def test_starting_does_not_wait_and_the_source_is_free():
    """All is sent before anything is taken, in another order; what was sent may be overwritten."""
    a, b = mesh([0, 1]), mesh([2, 3])
    src, dst = spec(a, [S(0)], (1 << 18,)), spec(b, [S(0)], (1 << 18,))
    if dst.mesh.coordinate is not None:
        dist.barrier()  # everything has been sent and overwritten before any of it is asked for
    arrivals = []
    for i in range(4):
        x = torch.full(src.local_shape, float(i))
        arrivals.append(cross_mesh.start(x, src, dst, p2p.next_tag()))
        x.fill_(-1)
    if dst.mesh.coordinate is None:
        dist.barrier()
    back = cross_mesh.start(torch.full(dst.local_shape, 9.0), dst, src, p2p.next_tag())
    for i in (2, 0, 3, 1, 2):
        out = arrivals[i].wait()
        assert out.shape == dst.local_shape and (out == i).all()
    assert (back.wait() == 9).all() and back.wait().shape == src.local_shape
    p2p.flush(30)


@on_ranks(4)
def test_a_rank_of_neither_mesh_has_nothing_to_do():
    a, b = mesh([0]), mesh([1])
    src, dst = spec(a, [R], (8, 4)), spec(b, [R], (8, 4))
    x = torch.ones(8, 4) if a.coordinate is not None else torch.empty(0)
    transfer = p2p.transfer
    if world()[0] > 1:
        p2p.transfer = None
    try:
        with dt.debugging.record_comms() as log:
            out = cross_mesh.start(x, src, dst, p2p.next_tag()).wait()
    finally:
        p2p.transfer = transfer
    assert out.numel() == (32 if b.coordinate is not None else 0) and out.dtype == torch.float32
    assert log.total_bytes == (128 if a.coordinate is not None else 0)


@on_ranks(4)
def test_a_view_is_given_where_nothing_moves_on_any_rank():
    a, b, c = mesh([0, 1, 2, 3]), mesh([[0, 1], [2, 3]]), mesh([[1, 0], [2, 3]])
    x = torch.ones(4)
    same = reshard.run(x, spec(a, [R], (4,)), spec(b, [R, R], (4,)))
    assert same.data_ptr() == x.data_ptr()
    y = torch.ones(spec(a, [S(0)], (4,)).local_shape)
    moved = reshard.run(
        y, spec(a, [S(0)], (4,)), spec(c, [S(0), S(0)], (4,))
    )  # ranks 2 and 3 keep theirs
    assert moved.data_ptr() != y.data_ptr()
    made = reshard.run(x, spec(a, [R], (4,)), spec(b, [P(), R], (4,)))
    assert made.data_ptr() != x.data_ptr()


@on_ranks(4)
def test_a_local_of_another_shape_is_refused():
    src, dst = spec(mesh([0, 1]), [S(0)], (6,)), spec(mesh([2, 3]), [S(0)], (6,))
    if src.mesh.coordinate is not None:
        with pytest.raises(ValueError, match=r"shape \(7,\).*is \(3,\); nothing was moved"):
            cross_mesh.start(torch.ones(7), src, dst, 0)


@dataclass(frozen=True)
class Late(dt.Partial):
    """A placement type of a user's own."""


@on_ranks(4)
def test_placements_of_a_users_type():
    before = dict(moves)
    try:
        reshard.register(Late, dt.Replicate, kind="late")(
            lambda x, src, dst, axes: collectives.all_reduce(x, "sum", src.mesh.group(axes))
        )
        reshard.register(dt.Replicate, Late, kind="late")(
            lambda x, src, dst, axes: x if src.mesh.coordinate == (0,) else torch.zeros_like(x)
        )
        a, b = mesh([0, 1]), mesh([2, 3])
        for left, right in [
            (Late(), R),
            (R, Late()),
            (Late(), Late()),
            (Late(), S(0)),
            (P(), Late()),
        ]:
            check(spec(a, [left], (5, 3)), spec(b, [right], (5, 3)), value((5, 3)))
    finally:
        moves.clear()
        moves.update(before)


@on_ranks(2)
def test_large_values_of_half_precision_become_averages_without_overflow():
    first, both = ProcessMesh([0], ("dp",)), ProcessMesh([0, 1], ("dp",))
    for dtype in (torch.float16, torch.bfloat16):
        whole = torch.full((4,), 40000.0, dtype=dtype)
        for source, how in ((first, [R]), (first, [S(0)]), (both, [S(0)]), (both, [R])):
            x = dt.shard_tensor(whole, source, how)
            y = dt.reshard(x, both, [P("avg")])
            assert y.placements == (P("avg"),)
            assert torch.equal(y.full_tensor(), whole)
