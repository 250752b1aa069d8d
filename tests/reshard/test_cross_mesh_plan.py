"""Who sends what when a tensor crosses to another mesh: all ranks in one process, nothing is sent.

The meaning of a crossing is written here a second time, by counting: every element that a rank
needs comes to it once, or is there already.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import reshard
from disttensor.comm import p2p
from disttensor.comm.work import finished
from disttensor.core.mesh import ProcessMesh
from reshard.cross_mesh import fill, plan_between, start
from tests.support.pool import fake_world
from tests.support.reshard_cases import P, R, S, layouts, locals_of, spec, value, value_of, window

WORLD = 96
N = 64 * 32 * 4  # bytes of a tensor in most tests below
HOPELESS = -99


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with fake_world(WORLD, rank=WORLD - 1):
        yield


def mesh(ranks):
    """A mesh of these ranks; of ``(first rank, *shape)`` where they are consecutive."""
    if isinstance(ranks, tuple):
        first, *shape = ranks
        ranks = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
    array = torch.as_tensor(ranks)
    return ProcessMesh(array, ("dp", "tp", "pp")[: array.ndim])


def cross(m, left, n, right, shape=(64, 32), dtype=torch.float32):
    m, n = mesh(m), mesh(n)
    return plan_between(spec(m, left, shape, dtype), spec(n, right, shape, dtype))


def check(plan, dtype=torch.float64):
    """Move all messages of all ranks; what arrives is right, and nothing comes twice or in vain."""
    before, after = plan.before, plan.after
    whole = value(before.shape, dtype)
    held = dict(zip(before.mesh.ranks, locals_of(before, whole).values(), strict=True))
    ranks = sorted({*before.mesh.ranks, *after.mesh.ranks})
    routes = {rank: plan.routing.of(rank) for rank in ranks}
    sent = {(r, to): box for r in ranks for to, box in routes[r].sends}
    received = {(r, to): box for to in ranks for r, box in routes[to].receives}
    assert sent == received and all(r != to for r, to in sent)
    arrived, lacking = {}, 0
    for rank, place in zip(after.mesh.ranks, after.mesh.coordinates(), strict=True):
        how = routes[rank]
        box = after.box_at(place)
        if any(place[axis] for axis, _ in plan.once):
            assert how.target is None and not how.receives
            arrived[place] = fill(torch.empty(box.shape, dtype=dtype), place, plan)
            continue
        assert how.target == box
        count = torch.zeros(after.shape, dtype=torch.int64)
        got = torch.full(after.shape, HOPELESS, dtype=torch.float64).to(dtype)
        if how.kept:
            part(count, how.kept).add_(1)
            part(got, how.kept).copy_(how.kept.cut(held[rank], how.source))
        for sender, piece in how.receives:
            part(count, piece).add_(1)
            part(got, piece).copy_(piece.cut(held[sender], routes[sender].source))
        assert (part(count, box) == 1).all() and count.sum() == part(count, box).sum()
        summand = before.mesh.coordinate_of(rank)  # on the axes of reductions that stay
        if how.source and all(summand[axis] == place[axis] for axis, _ in before.layout.partial):
            lacking -= overlap(how.source, box)
        lacking += part(count, box).numel()
        arrived[place] = fill(part(got, box), place, plan)
    assert plan.nbytes == lacking * dtype.itemsize
    for place, got in value_of(after, arrived).items():
        assert torch.equal(got, window(whole, after.box_at(place))), f"{plan} at {place}"


def part(x, box):
    return x[box.slices]


def overlap(a, b):
    n = 1
    for i, size, j, other in zip(*a, *b, strict=True):
        n *= max(0, min(i + size, j + other) - max(i, j))
    return n


# What arrives ------------------------------------------------------------------------------------

OPS = ("sum", "avg", "max", "min", "prod")


@pytest.mark.parametrize("shape", [(5, 3), (12, 8, 4), (1, 7), (0, 3), (17,), ()], ids=str)
def test_any_layout_to_any_layout_between_any_meshes(shape):
    rnd = random.Random(str(shape))
    sizes = [(1,), (2,), (5,), (2, 3), (3, 1), (2, 2, 2), (4, 2)]
    for _ in range(150):
        ends = []
        for size in (rnd.choice(sizes), rnd.choice(sizes)):
            n = torch.Size(size).numel()
            ranks = rnd.sample(range(rnd.choice([n, 12])), n) if n < 12 else range(n)
            m = torch.tensor(list(ranks)).reshape(size).tolist()
            ends += [m, random_layout(rnd, len(size), len(shape))]
        if ends[0] != ends[2]:
            check(cross(*ends, shape, torch.float64))


def random_layout(rnd, axes, ndim):
    out = [
        rnd.choice([R, *[S(d) for d in range(ndim)] * 3, P(rnd.choice(OPS))]) for _ in range(axes)
    ]
    for d in range(ndim):  # a random order of the axes that split a dim
        split = [i for i, p in enumerate(out) if p == S(d)]
        for i, order in zip(split, rnd.sample(range(len(split)), len(split)), strict=True):
            out[i] = S(d, order)
    return out


@pytest.mark.parametrize("op", ["any", "all", "max", "min"])
def test_bool(op):
    for left in layouts(2, 1, (op,)):
        for right in layouts(2, 1, (op,)):
            for there in ([4, 5, 6], [2, 0], [1, 3]):
                check(cross([0, 1, 2], left, there, right, (5, 3), torch.bool), torch.bool)


def test_every_pair_of_layouts_between_overlapping_meshes():
    a, b = [[0, 1], [2, 3]], [[4, 1], [3, 5]]
    for left in layouts(2, 2, ("sum", "max")):
        for right in layouts(2, 2, ("sum", "max")):
            check(cross(a, left, b, right, (5, 3), torch.float64))


@pytest.mark.parametrize(
    ("a", "left", "b", "right"),
    [
        ((0, 8, 8), [S(0), S(1)], (16, 8, 8), [S(0), S(1)]),
        ((0, 64), [S(0)], (8, 64), [S(1)]),
        ((0, 4, 4, 4), [S(0), R, S(1)], (32, 64), [S(0)]),
        ((0, 64), [P()], (64, 4, 8), [S(1), S(1)]),
    ],
    ids=str,
)
def test_large_worlds(a, left, b, right):
    check(cross(a, left, b, right, (70, 50), torch.float64))


# What it costs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "left", "b", "right", "total"),
    [
        ((0, 4), S(0), (4, 2), S(0), N),
        ((0, 2), S(0), (2, 4), S(1), N),
        ((0, 4), R, (4, 2), R, 2 * N),
        ((0, 4), R, (4, 2), S(0), N),
        ((0, 1), R, (1, 3), R, 3 * N),
        ((0, 4), S(0), (0, 2), S(0), 3 * N / 4),  # rank 0 keeps a quarter, rank 1 nothing
        ((0, 4), S(0), (0, 1), R, 3 * N / 4),
        ((0, 2), R, (0, 4), R, 2 * N),
        ((0, 2), R, (0, 1), S(0), 0),
        ([0, 1], S(0), [1, 0], S(0), N),
        ([0, 1], R, [1, 0], S(0), 0),
        ((0, 2), R, (2, 4), P(), N),  # the first rank of the axis holds the value
        ((0, 2), P(), (2, 2), P(), 2 * N),  # each its summand
    ],
    ids=str,
)
def test_only_what_is_lacking_travels_once(a, left, b, right, total):
    assert cross(a, [left], b, [right]).nbytes == total


def test_equal_meshes_with_equal_placements_pair_by_coordinate():
    a, b = mesh((0, 4, 2)), mesh((20, 4, 2))
    for layout in layouts(2, 2, ("sum", "max", "avg")):
        plan = plan_between(spec(a, layout, (5, 3)), spec(b, layout, (5, 3)))
        pairs = {(r, to) for r in a.ranks for to, _ in plan.routing.of(r).sends}
        assert pairs <= {(r, r + 20) for r in a.ranks}
        assert reshard.cost(plan.src, plan.before) == 0 and plan.after is plan.dst
        sources = {r: plan.routing.of(r).source for r in a.ranks}
        whole = {r for r, box in sources.items() if box and box.numel}
        assert {r for r, _ in pairs} == whole


@pytest.mark.parametrize("right", [R, S(0)])
def test_replicas_share_the_work(right):
    plan = cross((0, 4), [R], (8, 8), [right])
    assert set(plan.routing.sent.values()) == {plan.routing.elements // 4}
    mixed = [8, 0, 9, 1, 10, 2, 11, 3]  # every other one has it already
    plan = cross((0, 4), [R], mixed, [right])
    assert set(plan.routing.sent.values()) == {plan.routing.elements // 4}


def test_a_reduction_is_scattered_where_that_is_cheaper():
    plan = cross((0, 4), [P()], (4, 4), [S(0)])
    assert plan.before.placements == (S(0),) and len(plan.routing.messages) == 4
    assert [s.kind for s in reshard.choose(plan.src, plan.dst)] == ["reduce_scatter", "send_recv"]
    plan = cross((0, 4), [P()], (4, 4), [S(1)])
    assert plan.before.placements == (S(1),) and len(plan.routing.messages) == 4
    plan = cross((0, 4), [P()], (4, 1), [R], ())
    assert [s.kind for s in reshard.choose(plan.src, plan.dst)] == ["all_reduce", "send_recv"]


def test_a_reduction_travels_as_it_is_only_where_that_is_cheaper():
    layout = [P(), S(0)]
    plan = cross((0, 4, 4), layout, (16, 4, 4), layout)
    assert plan.before is plan.src and plan.nbytes == 4 * N
    plan = cross(
        (0, 4, 4), layout, (16, 4, 4), [P(), R]
    )  # to one row of four ranks instead of to all
    assert plan.before.placements[0] != P() and plan.nbytes == 4 * N


def test_mixed_reductions_are_not_kept_out_of_order():
    plan = cross((0, 2, 2), [P("sum"), P("max")], (4, 2, 2), [P("sum"), R])
    assert not plan.before.layout.partial
    check(cross((0, 2, 2), [P("sum"), P("max")], (4, 2, 2), [P("max"), P("sum")], (5, 3)),
          torch.float32)  # fmt: skip


def test_choose_and_cost_between_meshes():
    src = spec(mesh((0, 2, 2)), [P(), S(1)], (64, 32))
    dst = spec(mesh((4, 2)), [S(0)], (64, 32))
    first, last = reshard.choose(src, dst)
    assert (first.kind, first.bytes) == ("reduce_scatter", N / 4)
    assert (last.kind, last.axis, last.bytes) == ("send_recv", "dp+tp -> dp", N / 4)
    assert last.src is first.dst and last.dst is dst
    assert reshard.cost(src, dst) == N / 2
    assert str(last).startswith("send_recv over dp+tp -> dp: f32[64@dp, 32@tp] -> f32[64@dp, 32]")


# What is refused ---------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(monkeypatch):
    a, b = mesh((0, 2)), mesh((2, 2))
    with pytest.raises(ValueError, match="cannot change the shape"):
        plan_between(spec(a, [R], (4,)), spec(b, [R], (5,)))
    with pytest.raises(ValueError, match="cannot change the dtype"):
        plan_between(spec(a, [R], (4,)), spec(b, [R], (4,), torch.float64))
    other = spec(mesh([5, 6]), [R], (4,))
    monkeypatch.setattr(other.mesh, "device_type", "cuda")
    with pytest.raises(
        ValueError, match=r"(?s)ranks=\[5, 6\]\) is on cuda.*ranks=\[2, 3\]\) on cpu"
    ):
        plan_between(other, spec(b, [R], (4,)))


def test_a_local_of_another_shape_is_refused():
    here, there = mesh([WORLD - 1]), mesh([0])
    with pytest.raises(ValueError, match=r"has shape \(3,\).*nothing was moved"):
        start(torch.ones(3), spec(here, [R], (4,)), spec(there, [R], (4,)), tag=0)


# What arrives ------------------------------------------------------------------------------------


def test_a_message_that_is_the_whole_piece_is_not_copied(monkeypatch):
    whole, messages = value((4, 6)), []
    monkeypatch.setattr(p2p, "transfer", lambda *_: [finished(m) for m in messages])
    here, there, both = mesh([WORLD - 1]), mesh([0]), mesh([0, WORLD - 1])
    dst = spec(here, [R], (4, 6))

    messages = [whole.clone()]
    src = spec(there, [R], (4, 6))
    got = start(torch.empty(src.local_shape), src, dst, tag=0).wait()
    assert torch.equal(got, whole) and got.data_ptr() == messages[0].data_ptr()

    messages = [whole[:2].clone()]
    got = start(whole[2:].clone(), spec(both, [S(0)], (4, 6)), dst, tag=0).wait()
    assert torch.equal(got, whole)
