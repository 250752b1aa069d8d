"""Every kind of movement on threads: many layouts and big meshes, without processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

import reshard
from disttensor.comm import collectives
from disttensor.core.layout import balanced_ranges
from disttensor.core.placement import Balanced, Partial, Replicate
from reshard.registry import moves
from tests.support.reshard_cases import (
    P,
    R,
    S,
    Threads,
    check_pair,
    layouts,
    locals_of,
    reduce,
    spec,
    value,
)

OPS = ("sum", "avg", "max", "min", "prod")


def run_pairs(world: Threads, pairs, shape, dtype=torch.float32) -> None:
    """reshard.run for all pairs of placements on all ranks; the inputs must stay as they were."""
    whole = value(shape, dtype)
    first = world.meshes[0]
    inputs = {a: locals_of(spec(first, a, shape, dtype), whole) for a, _ in pairs}

    def body(mesh):
        outs = []
        for a, b in pairs:
            x = inputs[a][mesh.coordinate]
            before = x.clone()
            out = reshard.run(x, spec(mesh, a, shape, dtype), spec(mesh, b, shape, dtype))
            assert torch.equal(x, before) and out.dtype == dtype
            outs.append(out.clone())
        return outs

    results = world.run_on(body)
    for i, (a, b) in enumerate(pairs):
        s, d = (spec(first, p, shape, dtype) for p in (a, b))
        check_pair(s, d, whole, {place: outs[i] for place, outs in results.items()})


@pytest.mark.parametrize("shape", [(5, 3), (3, 8), (1, 4), (0, 3)], ids=str)
def test_every_pair_on_one_axis_of_four(shape, monkeypatch):
    pairs = list(itertools.product(layouts(2, 1, OPS), repeat=2))
    run_pairs(Threads((4,), monkeypatch), pairs, shape)


@pytest.mark.parametrize("shape", [(5, 3), (8, 4)], ids=str)
def test_every_pair_on_two_by_two(shape, monkeypatch):
    pairs = list(itertools.product(layouts(2, 2, ("sum", "max")), repeat=2))
    run_pairs(Threads((2, 2), monkeypatch), pairs, shape)


def test_any_order_of_axes_on_one_dim(monkeypatch):
    orders = [
        (S(0), S(0)),
        (S(0, 1), S(0, 0)),
        (S(0), S(1)),
        (R, S(0)),
        (S(0), R),
        (S(1), S(1)),
        (R, R),
    ]
    pairs = list(itertools.product(orders, repeat=2))
    for shape in [(5, 3), (7, 2), (12, 6)]:
        run_pairs(Threads((2, 3), monkeypatch), pairs, shape)


@pytest.mark.parametrize("mesh", [(2, 3, 2), (2, 2, 2, 2), (1, 3, 1, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 4), (17,), ()], ids=str)
def test_random_layouts_on_big_meshes(mesh, shape, monkeypatch):
    rnd = random.Random(str((mesh, shape)))
    choices = [R, *map(P, OPS)] + [S(d) for d in range(len(shape))] * 3

    def layout():
        out = [rnd.choice(choices) for _ in mesh]
        for d in range(len(shape)):  # a random order of the axes that split a dim
            axes = [i for i, p in enumerate(out) if p == S(d)]
            for i, order in zip(axes, rnd.sample(range(len(axes)), len(axes)), strict=True):
                out[i] = S(d, order)
        return tuple(out)

    run_pairs(Threads(mesh, monkeypatch), [(layout(), layout()) for _ in range(60)], shape)


@pytest.mark.parametrize("op", ["any", "all", "max", "min"])
def test_bool(op, monkeypatch):
    pairs = list(itertools.product(layouts(2, 1, (op,)), repeat=2))
    run_pairs(Threads((4,), monkeypatch), pairs, (5, 3), torch.bool)


def test_bools_of_two_kinds_keep_their_order(monkeypatch):
    pairs = list(itertools.product(layouts(1, 2, ("any", "all")), repeat=2))
    run_pairs(Threads((2, 2), monkeypatch), pairs, (23,), torch.bool)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16, torch.float64])
def test_dtypes(dtype, monkeypatch):
    ops = ("max", "min") if dtype == torch.uint8 else ("sum", "max", "min", "prod")
    pairs = list(itertools.product(layouts(2, 1, ops), repeat=2))
    run_pairs(Threads((3,), monkeypatch), pairs, (5, 3), dtype)


@dataclass(frozen=True)
class Largest(Partial):
    """A user's own reduction."""


def reduce_largest(x, src, dst, axes):
    return collectives.all_reduce(x, "max", src.mesh.group(axes))


def keep_largest(x, src, dst, axes):
    return x


@pytest.fixture
def largest():
    kept = dict(moves)
    reshard.register(Largest, Replicate, cost=lambda a, b, n: 2 * a)(reduce_largest)
    reshard.register(Replicate, Largest)(keep_largest)
    yield
    moves.clear()
    moves.update(kept)


def cut(x, s, place):
    """The piece of x at ``place``; each dim is split by one axis at most."""
    for p, i, n in zip(s.placements, place, s.mesh.shape, strict=True):
        if isinstance(p, Balanced):
            ranges = balanced_ranges(x.shape[p.dim], i, n)
            x = torch.cat([x.narrow(p.dim, start, stop - start) for start, stop in ranges], p.dim)
        elif isinstance(p, S):
            x = x.chunk(n, p.dim)[i]
    return x


def meant(s, parts):
    """The value of ``s`` at every place, inner axes first: ``parts`` are the locals."""
    for axis, p in reversed([*enumerate(s.placements)]):
        if isinstance(p, Partial):
            n = s.mesh.shape[axis]
            sides = {q: [(*q[:axis], i, *q[axis + 1 :]) for i in range(n)] for q in parts}
            parts = {q: reduce(p.reduce_op, [parts[side] for side in sides[q]]) for q in parts}
    return parts


@pytest.mark.parametrize("number", range(4))
def test_contributions_of_mixed_kinds_are_reduced_in_order(number, largest, monkeypatch):
    """Each rank has values of its own, which no reshard has made."""
    world, draw, shape = Threads((2, 2), monkeypatch), random.Random(number), (8, 4)
    options = [R, S(0), S(1), Balanced(0), Largest("max"), *map(P, ("sum", "max", "min", "prod"))]
    first, pairs = world.meshes[0], []
    while len(pairs) < 200:
        pair = tuple(tuple(draw.choice(options) for _ in range(2)) for _ in range(2))
        if all(len({p.dim for p in o if isinstance(p, S)}) == sum(isinstance(p, S) for p in o)
               for o in pair):  # fmt: skip
            pairs.append(pair)
    inputs, wholes = [], []
    for i, (a, _) in enumerate(pairs):
        s, g = spec(first, a, shape), torch.Generator().manual_seed(100 * number + i)
        pending = [isinstance(p, Partial) for p in a]
        drawn = {}
        for place in world.all:
            key = tuple(n if open_ else 0 for n, open_ in zip(place, pending, strict=True))
            drawn[place] = drawn.setdefault(key, torch.randint(-3, 4, shape, generator=g).float())
        wholes.append(meant(s, drawn)[0, 0])
        inputs.append({place: cut(drawn[place], s, place) for place in world.all})

    def body(mesh):
        return [
            reshard.run(inputs[i][mesh.coordinate], spec(mesh, a, shape), spec(mesh, b, shape))
            for i, (a, b) in enumerate(pairs)
        ]

    results = world.run_on(body)
    for i, (a, b) in enumerate(pairs):
        d = spec(first, b, shape)
        for place, got in meant(d, {place: outs[i] for place, outs in results.items()}).items():
            want = cut(wholes[i], d, place)
            assert torch.equal(got, want), (
                a,
                b,
                [str(x) for x in reshard.choose(spec(first, a, shape), d)],
            )


NARROW = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_moves_that_compute_nothing_keep_values_of_narrow_dtypes(dtype, monkeypatch):
    bits = torch.tensor([0, 1, 3, 5, 8, 64, 100, 120])
    whole = bits.to(torch.int8).view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
    ends = [R, S(0), Balanced(0)]
    pairs = [*itertools.product(ends, repeat=2), (S(0), P("max")), (S(0), P("min"))]

    def body(mesh):
        out = []
        for a, b in pairs:
            s, d = spec(mesh, [a], (8,), dtype), spec(mesh, [b], (8,), dtype)
            moved = reshard.run(cut(whole, s, mesh.coordinate).clone(), s, d)
            out.append((moved.double(), cut(whole, d, mesh.coordinate).double()))
        return out

    results = Threads((2,), monkeypatch).run_on(body)
    for i, (a, b) in enumerate(pairs):
        if isinstance(b, Partial):
            got = reduce(b.reduce_op, [rows[i][0] for rows in results.values()])
            assert torch.equal(got, whole.double()), (a, b)
        else:
            assert all(torch.equal(*rows[i]) for rows in results.values()), (a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("before", [S(0), Balanced(0), R], ids=str)
def test_large_values_made_pending_averages_do_not_overflow(before, dtype, monkeypatch):
    whole = torch.full((4,), 0.75 * torch.finfo(dtype).max, dtype=dtype)

    def body(mesh):
        s, d = spec(mesh, [before], (4,), dtype), spec(mesh, [P("avg")], (4,), dtype)
        return reshard.run(cut(whole, s, mesh.coordinate).clone(), s, d)

    parts = Threads((2,), monkeypatch).run_on(body)
    assert torch.equal(reduce("avg", [*parts.values()]), whole)
