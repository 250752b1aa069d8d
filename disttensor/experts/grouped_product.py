"""Products of groups of rows, each with its own matrix, on regular tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

Tensor = torch.Tensor


def grouped_product(rows: Tensor, weight: Tensor, counts: Sequence[int], turned: bool) -> Tensor:
    """Multiplies rows [n, i], the first counts[0] with weight[0], and so on. weight is
    [groups, i, o], or [groups, o, i] if ``turned``; the result [n, o] has the dtype of autocast, or
    else of the weight. Differentiable to every order."""
    device = rows.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return Product.apply(rows.to(dtype), weight.to(dtype), tuple(counts), turned)


def _parts(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Yields (group, first row, one past the last) of the groups that have rows."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(g, start, stop) for g, (start, stop) in enumerate(ends) if stop > start]


class Product(torch.autograd.Function):
    """rows of group g times weight[g], or its transpose if ``turned``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Any, turned: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.how = counts, turned
        w = weight.transpose(1, 2) if turned else weight
        out = rows.new_empty((len(rows), w.shape[2]))
        for g, start, stop in _parts(counts):
            torch.mm(rows[start:stop], w[g], out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        counts, turned = ctx.how
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = Product.apply(grad, weight, counts, not turned)
        if ctx.needs_input_grad[1]:
            of_weight = Outer.apply(*((grad, rows) if turned else (rows, grad)), counts)
        return of_rows, of_weight, None, None


class Outer(torch.autograd.Function):
    """[n, i], [n, o] -> [groups, i, o]: the sum of outer products of each group's rows."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, counts: Any) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.counts = counts
        out = left.new_empty((len(counts), left.shape[1], right.shape[1]))
        for g, count in enumerate(counts):
            if not count:
                out[g] = 0
        for g, start, stop in _parts(counts):
            torch.mm(left[start:stop].t(), right[start:stop], out=out[g])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left, right = ctx.saved_tensors
        of_left = Product.apply(right, grad, ctx.counts, True)
        return of_left, Product.apply(left, grad, ctx.counts, False), None
