"""Layouts are pure: both notations, where data lies, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from disttensor.core.layout import (
    Layout,
    box_at,
    chunk,
    describe,
    dims_mapping_of,
    layout_from_mapping,
    layout_of,
    replicated,
)
from disttensor.core.placement import Partial, Replicate, Shard, show

R, S, P = Replicate(), Shard, Partial
EVERY = list(itertools.product([R, S(0), S(1), P(), P("max")], repeat=3))


@pytest.mark.parametrize("size", range(8))
@pytest.mark.parametrize("parts", range(1, 6))
def test_chunk_is_torch_chunk(size, parts):
    pieces = [
        torch.arange(size)[o : o + n].tolist()
        for o, n in (chunk(size, parts, i) for i in range(parts))
    ]
    theirs = [t.tolist() for t in torch.arange(size).chunk(parts)]
    assert [p for p in pieces if p] == [t for t in theirs if t]
    assert len(pieces) == parts and [i for p in pieces for i in p] == list(range(size))


def test_five_over_four_leaves_one_rank_empty():
    assert [chunk(5, 4, i) for i in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


@pytest.mark.parametrize("placements", EVERY, ids=show)
def test_placements_and_layout_say_the_same(placements):
    layout = layout_of(placements, 2, 3)
    assert layout.placements(3) == placements
    assert layout_of(layout.placements(3), 2, 3) is not None
    again = layout_from_mapping(dims_mapping_of(layout), dict(layout.partial), 3)
    assert again == layout and hash(again) == hash(layout)
    assert layout.sharded == {a for a, p in enumerate(placements) if isinstance(p, Shard)}
    assert layout.partial_axes == {a for a, p in enumerate(placements) if isinstance(p, Partial)}
    assert layout.varies() == {a for a, p in enumerate(placements) if p != R}
    for axis, p in enumerate(placements):
        assert layout.dim_of(axis) == (p.dim if isinstance(p, Shard) else None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_order_of_axes_on_one_dim_is_kept(order):
    layout = Layout((order, ()))
    assert layout_of(layout.placements(3), 2, 3) == layout
    assert dims_mapping_of(layout) == [list(order), -1]
    assert layout_from_mapping([list(order), -1], None, 3) == layout
    plain = all(p.order is None for p in layout.placements(3))
    assert plain == (order == (0, 1, 2))


def test_negative_dims_and_lone_placements():
    assert layout_of([S(-1), R], 2, 2) == layout_of([S(1), R], 2, 2)
    assert layout_of(S(0), 1, 1) == layout_of([S(0)], 1, 1)
    assert replicated(3) == layout_of([R, R], 3, 2) == Layout(((), (), ()))


@pytest.mark.feature("Layouts")
@pytest.mark.parametrize("shape", [(5, 3), (8, 4), (1, 7), (0, 3), (13,), ()], ids=str)
@pytest.mark.parametrize("mesh", [(4,), (2, 3), (2, 2, 2), (1, 3)], ids=str)
def test_boxes_tile_the_tensor(shape, mesh):
    axes = range(len(mesh))
    for where in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
        dims = tuple(tuple(reversed([a for a in axes if where[a] == d])) for d in range(len(shape)))
        holders = torch.zeros(shape)
        for place in itertools.product(*map(range, mesh)):
            offsets, sizes = box_at(shape, dims, mesh, place)
            holders[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        copies = torch.Size(mesh[a] for a in axes if where[a] is None).numel()
        assert torch.equal(holders, torch.full(shape, float(copies)))


def test_nested_pieces_are_pieces_of_pieces():
    rows = torch.arange(13)
    for i, j in itertools.product(range(2), range(3)):
        ((offset,), (size,)) = box_at((13,), ((0, 1),), (2, 3), (i, j))
        outer = rows.chunk(2)[i].chunk(3)
        want = outer[j].tolist() if j < len(outer) else []
        assert rows[offset : offset + size].tolist() == want


def test_describe():
    names = ("dp", "tp")
    layout = layout_of([S(0), P()], 2, 2)
    assert describe((8, 16), torch.float32, layout, names) == "f32[8@dp, 16] {tp: P(sum)}"
    both = layout_of([S(0, 1), S(0, 0)], 1, 2)
    assert describe((8,), torch.bfloat16, both, names) == "bf16[8@tp+dp]"
    assert describe((), torch.int64, replicated(0), names) == "i64[]"
    assert show([S(0), R, P("max")]) == "[S(0), R, P(max)]"


REFUSED = [
    ([S(0)], 2, "1 entries, but the mesh has 2 axes"),
    ([S(0), R, R], 2, "3 entries, but the mesh has 2 axes"),
    ([S(2), R], 2, r"Shard\(2\) on mesh axis 0 is out of range for a tensor of 2 dims"),
    ([R, S(-3)], 2, r"Shard\(-3\) on mesh axis 1"),
    ([S(0), R], 0, "a 0-d tensor cannot be sharded"),
    ([S(0, 1), S(0, 1)], 2, "two axes claim one order on dim 0"),
]


@pytest.mark.parametrize(("placements", "ndim", "words"), REFUSED)
def test_placements_that_do_not_fit(placements, ndim, words):
    with pytest.raises(ValueError, match=words):
        layout_of(placements, ndim, 2)


def test_what_is_no_placement():
    with pytest.raises(TypeError, match="'Shard' is no placement"):
        layout_of(["Shard", R], 2, 2)
    with pytest.raises(ValueError, match="no such reduction; use one of sum, avg"):
        Partial("mean")


@pytest.mark.parametrize(
    ("mapping", "partial", "words"),
    [
        ([2, -1], None, "no axis 2"),
        ([-2, -1], None, "no axis -2"),
        ([0, 0], None, "axis 0 is used twice"),
        ([[0, 1], 1], None, "axis 1 is used twice"),
        ([0, -1], {0: "sum"}, "axis 0 is used twice"),
        ([0, -1], {1: "mean"}, "no such reduction"),
    ],
)
def test_mappings_that_do_not_fit(mapping, partial, words):
    with pytest.raises(ValueError, match=words):
        layout_from_mapping(mapping, partial, 2)
