"""What a ring is made of: leading dims of a mask, and the ways that "auto" may choose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.layout import Layout, box_at
from ops.local import LocalCall, LocalPiece
from ops.nn.ring_attention import as_four_dims
from ops.nn.split_sequence import possible_policies
from tests.support.oracle import randn


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (4, 5, 7), (3, 1, 5, 7), (2, 3, 4, 5, 7)])
def test_a_mask_has_the_leading_dims_of_the_queries(shape: tuple[int, ...]) -> None:
    mask = randn(*shape)
    lengths = (5, 7) if shape[-2] > 1 else (1, 7)
    want = mask.expand(2, 3, 4, *lengths).flatten(0, 1)
    torch.testing.assert_close(as_four_dims(mask, (2, 3)).expand(-1, 4, -1, -1), want)


def ways(*shapes: tuple[int, ...], mesh: tuple[int, ...] = (2,)) -> list[str]:
    """Of q, k, v and a mask whose lengths the first axis splits, and whose heads the second."""
    pieces = []
    for i, shape in enumerate(shapes):
        heads = (1,) if len(mesh) > 1 else ()
        dims = ((), heads, (0,) if i < 3 else (), ())
        box = box_at(shape, dims, mesh, (0,) * len(mesh))
        pieces.append(LocalPiece(shape, box, Layout(dims), torch.float64))
    none: dict[object, tuple[int, ...]] = {}
    call = LocalCall(
        F.scaled_dot_product_attention, pieces, pieces[:1], none, mesh, (0,) * len(mesh), None
    )
    return possible_policies(call, (0,), 0.0)


def test_heads_are_a_way_where_the_axes_divide_those_of_queries_and_of_keys() -> None:
    four_, two, one = (2, 4, 6, 3), (2, 2, 6, 3), (2, 1, 6, 3)
    assert "heads" in ways(four_, four_, four_)
    assert "heads" in ways(four_, two, two)
    assert "heads" not in ways(four_, one, one)
    assert "heads" not in ways((2, 3, 6, 3), two, two)
    assert "heads" not in ways(four_, two, two, mesh=(2, 2))
    assert "heads" in ways(four_, four_, four_, mesh=(2, 2))
    assert "heads" in ways(four_, four_, four_, (2, 1, 1, 6))
    assert "heads" not in ways(four_, four_, four_, (2, 1, 6, 6))  # a mask with rows of its own
