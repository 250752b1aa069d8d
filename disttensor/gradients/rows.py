"""Several tensors in one collective, as one row per rank.

    tensors  [5, 2] and [3], over n = 2 ranks            row 0:  a0 a1 a2  b0 b1
    cut along dim 0 as torch.chunk does                  row 1:  a3 a4 --  b2 --

Row i holds piece i of every tensor; short pieces are padded, so that all rows have one length. An
all-gather joins rows, a reduce-scatter sums each row over n ranks. This module uses shapes only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from disttensor.comm import buffers
from disttensor.core.layout import chunk

Tensor = torch.Tensor


class BucketLayout:
    """The positions of tensors with these (local) shapes in ``n`` rows.

    sizes[j], offsets[j]  elements of tensor j in a row, and the index of the first
    total                 the length of a row
    """

    def __init__(self, shapes: Sequence[Sequence[int]], n: int) -> None:
        self.n = n
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(self.piece_shape(j, 0)) for j in range(len(self.shapes))]
        self.offsets = list(itertools.accumulate(self.sizes, initial=0))
        self.total = self.offsets.pop()

    def pack_row(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the row [total] of the rank that holds these pieces."""
        row = buffers.empty(self.total, dtype, pieces[0].device)
        parts, flat = [], []
        for piece, part in zip(pieces, row.split(self.sizes), strict=True):
            count = piece.numel()
            if count < len(part):
                part[count:].zero_()
                part = part[:count]
            if count:
                parts.append(part)
                flat.append(piece.reshape(-1))
        if parts:
            torch._foreach_copy_(parts, flat)
        return row

    def blocks(self, memory: Tensor) -> list[Tensor]:
        """Splits [n * total] into one [n, size] per tensor, which starts with its elements."""
        parts = memory.split([self.n * size for size in self.sizes])
        return [p.view(self.n, size) for p, size in zip(parts, self.sizes, strict=True)]

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Returns the tensors in ``memory`` ([n * total]) as views."""
        return [
            block.view(-1)[: math.prod(shape)].view(shape)
            for block, shape in zip(self.blocks(memory), self.shapes, strict=True)
        ]

    def unpack(self, rows: Tensor, blocks: list[Tensor]) -> None:
        """Copies the pieces of all ranks, [n, total], to their places."""
        torch.split_with_sizes_copy(rows, self.sizes, dim=1, out=blocks)

    def pieces(self, row: Tensor, index: int) -> list[Tensor]:
        """Splits [total], the row of rank ``index``, into its pieces: views without the padding."""
        out = []
        for j, part in enumerate(row.split(self.sizes)):
            shape = self.piece_shape(j, index)
            out.append(part[: math.prod(shape)].view(shape))
        return out

    def piece_shape(self, j: int, index: int) -> tuple[int, ...]:
        shape = self.shapes[j]
        return (chunk(shape[0], self.n, index)[1], *shape[1:]) if shape else ()

    def piece(self, j: int, tensor: Tensor, index: int) -> Tensor:
        """Returns piece ``index`` of tensor j as a view."""
        return chunk_of(tensor, self.n, index) if self.shapes[j] else tensor


def chunk_of(tensor: Tensor, n: int, index: int) -> Tensor:
    """Returns piece ``index`` of n along dim 0 as a view."""
    start, length = chunk(len(tensor), n, index)
    return tensor[start : start + length]


Bucket = tuple[BucketLayout, Sequence[Tensor], Sequence[float]]  # layout, its tensors, tail


def pack(buckets: Sequence[Bucket], dtype: torch.dtype, custom: Any = None) -> Tensor:
    """Returns [n, sum of (total + len(tail))]: rows of all tensors, where the tensors of each
    bucket are followed by its tail. ``custom``: the user's reduce-scatter, which allocates."""
    n, first = buckets[0][0].n, buckets[0][1][0]
    # Upcast sums have the dtype of the parameter; one message has one dtype.
    of = functools.reduce(torch.promote_types, (t.dtype for _, full, _ in buckets for t in full))
    width = sum(b.total + len(tail) for b, _, tail in buckets)
    out = buffers.empty(n * width, dtype, first.device, custom).view(n, width)
    parts: list[Tensor] = []
    for _, tensors, tail in buckets:
        parts += [t.to(of) for t in tensors if t.numel()]  # an empty one takes no place in a row
        if tail:
            parts.append(buffers.constants((*tail,) * n, of, first.device))
    torch._chunk_cat(parts, dim=0, num_chunks=n, out=out)
    return out
