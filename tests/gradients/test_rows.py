"""Pieces of several tensors in one collective. Pure: what ranks would send and get is put
together here."""

from __future__ import annotations

import pytest
import torch

from disttensor.gradients.rows import BucketLayout, pack
from tests.support.oracle import randn

SHAPES = {
    "even": [(4, 3), (8,)],
    "uneven": [(5, 2), (3,), (7, 1, 2)],
    "fewer than ranks": [(1, 4), (2,), (1,)],
    "a scalar": [(), (5,), ()],
    "one": [(9, 2)],
    "empty inside": [(3, 0), (2, 2)],
}
kinds = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
ranks = pytest.mark.parametrize("n", [1, 2, 3, 4, 5])


def tensors(shapes, seed=0):
    return [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def piece(x, n, i):
    """Of rank i, as torch.chunk cuts."""
    chunks = x.chunk(n) if x.ndim else [x] * n
    return chunks[i] if i < len(chunks) else x[:0]


@kinds
@ranks
def test_packed_rows_unpack_to_the_tensors(shapes, n):
    layout, full = BucketLayout(shapes, n), tensors(shapes)
    sent = [layout.pack_row([piece(x, n, i) for x in full], torch.float64) for i in range(n)]
    assert all(len(row) == layout.total for row in sent)
    memory = torch.full((n * layout.total,), torch.nan, dtype=torch.float64)
    layout.unpack(torch.stack(sent), layout.blocks(memory))
    for got, want in zip(layout.tensors(memory), full, strict=True):
        assert torch.equal(got, want)
        assert not got.numel() or got.untyped_storage().data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("shapes", [s for k, s in SHAPES.items() if k != "a scalar"], ids=str)
@ranks
def test_pieces_of_packed_rows_are_those_of_the_sums(shapes, n):
    layout = BucketLayout(shapes, n)
    brought = [tensors(shapes, seed=10 * r) for r in range(n)]
    tail = [1.0, 0.0]
    total = sum(pack([(layout, full, tail)], torch.float64) for full in brought)
    sums = [sum(full[j] for full in brought) for j in range(len(shapes))]
    assert total.shape == (n, 2 + layout.total)
    for i in range(n):
        assert total[i, layout.total :].tolist() == [float(n), 0.0]
        for j, got in enumerate(layout.pieces(total[i, : layout.total], i)):
            assert got.shape == layout.piece_shape(j, i)
            torch.testing.assert_close(got, piece(sums[j], n, i))
            assert torch.equal(layout.piece(j, sums[j], i), piece(sums[j], n, i))


@kinds
@ranks
def test_a_row_is_as_long_as_the_largest_pieces(shapes, n):
    layout = BucketLayout(shapes, n)
    assert layout.total == sum(piece(torch.empty(s), n, 0).numel() for s in shapes)
    assert layout.offsets == [sum(layout.sizes[:j]) for j in range(len(shapes))]


def test_padding_is_zero_and_the_dtype_is_asked_for():
    layout = BucketLayout([(3, 2), (1,)], 2)
    last = layout.pack_row([torch.ones(1, 2), torch.ones(0)], torch.bfloat16)
    assert last.dtype is torch.bfloat16 and last.tolist() == [1, 1, 0, 0, 0]
    full = [torch.ones(3, 2), torch.ones(1)]
    both = pack(
        [(layout, full, [7.0]), (BucketLayout([(2,)], 2), [torch.full((2,), 3.0)], [])],
        torch.bfloat16,
    )
    assert both.dtype is torch.bfloat16
    assert both.tolist() == [[1, 1, 1, 1, 1, 7, 3], [1, 1, 0, 0, 0, 7, 3]]
