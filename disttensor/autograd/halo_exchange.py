"""fetch: gets ranges of one dim from the ranks that hold them, in one all_to_all; differentiable
to every order.

Rank i holds the range ``src[i]`` of a dim and gets the range ``dst[i]``: at each position the sum
over the ranks that hold it. If the ranges of ``src`` are disjoint, this is the value of the one
holder. The same function with ``src`` and ``dst`` exchanged is its transpose, and so its backward:
gradients return to the holder, which adds them up.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm import collectives
from disttensor.comm.groups import Group

Tensor = torch.Tensor
Range = tuple[int, int]  # start and stop
Ranges = tuple[Range, ...]


def overlap(a: Range, b: Range) -> Range:
    """Returns the intersection as (start, length); length 0 if it is empty."""
    start = max(a[0], b[0])
    return start, max(0, min(a[1], b[1]) - start)


def local(src: Ranges, dst: Ranges) -> bool:
    """Returns True if every rank holds all of the range that it gets."""
    return all(overlap(a, b)[1] == b[1] - b[0] for a, b in zip(src, dst, strict=True))


def own(x: Tensor, dim: int, src: Range, dst: Range) -> Tensor:
    """Returns the range ``dst`` of a tensor that holds ``src`` around it. No communication."""
    start, length = overlap(src, dst)
    return x if src == dst else x.narrow(dim, start - src[0] if length else 0, length)


def _exchange(x: Tensor, dim: int, src: Ranges, dst: Ranges, group: Group) -> Tensor:
    me, none = group.index, x.new_empty(0)
    shape = list(x.shape)
    shape[dim] = dst[me][1] - dst[me][0]
    row = math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])
    from_each = [overlap(src[i], dst[me]) for i in range(group.size)]
    to_each = [overlap(src[me], dst[i]) for i in range(group.size)]
    away = lambda i, n: n if i != me else 0  # noqa: E731
    pieces = [
        x.narrow(dim, start - src[me][0], n) if away(i, n) else none
        for i, (start, n) in enumerate(to_each)
    ]
    got = collectives.all_to_all(
        pieces, [away(i, n) * row for i, (_, n) in enumerate(from_each)], group
    )
    out = x.new_zeros(shape)
    for i, (start, n) in enumerate(from_each):
        if n:
            shape[dim] = n
            piece = x.narrow(dim, start - src[me][0], n) if i == me else got[i].view(shape)
            out.narrow(dim, start - dst[me][0], n).add_(piece)
    return out


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, src: Ranges, dst: Ranges, group: Group) -> Tensor:
        ctx.how = dim, src, dst, group
        activation_checkpoint.join_region(ctx)
        return _exchange(x, dim, src, dst, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        activation_checkpoint.recompute_region(ctx)
        dim, src, dst, group = ctx.how
        return _Fetch.apply(grad, dim, dst, src, group), None, None, None, None


def fetch(x: Tensor, dim: int, src: Ranges, dst: Ranges, group: Group | None) -> Tensor:
    """Returns the range ``dst[i]`` of ``dim`` on member i of the group, which holds ``src[i]``.
    Without communication if all members hold their ranges."""
    if group is None or local(src, dst):
        i = 0 if group is None else group.index
        return own(x, dim, src[i], dst[i])
    return _Fetch.apply(x, dim % x.ndim, src, dst, group)
