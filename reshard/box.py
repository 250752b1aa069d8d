"""Boxes, as ``DistSpec.box_at`` gives them: (offsets, sizes) of a piece of the global tensor."""

from __future__ import annotations

import math

import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both, or None where there is none."""
    starts = tuple(map(max, a[0], b[0]))
    stops = [min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(n > 0 for n in sizes) else None


def cut(x: torch.Tensor, outer: Box, inner: Box) -> torch.Tensor:
    """The view of x that covers ``inner``; x holds the elements of ``outer``, around inner."""
    rows = zip(*outer, *inner, strict=True)
    for dim, (start, size, inner_start, inner_size) in enumerate(rows):
        if inner_size != size:
            # an empty piece may start behind the end
            x = x.narrow(dim, min(inner_start - start, size - inner_size), inner_size)
    return x


def numel(box: Box) -> int:
    return math.prod(box[1])
