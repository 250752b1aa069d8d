"""Reductions of each tensor of a list to a number: _foreach_norm, _foreach_powsum, _foreach_max.

The pieces' results are brought together by one all-reduce for all tensors that are split by the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from disttensor.layout import Axes
from ops.factors import Arg, Factors
from ops.foreach import grouped, lists_of
from ops.infer import NoRule
from ops.registry import rule


def each_to_number(tensors: Sequence[Arg], local: Callable[[Any], Any]) -> Factors:
    """Factors of a reduction of every tensor over all its dims; the local function brings pieces together."""

    def one(members: Sequence[Arg]) -> Factors:
        dims = tuple(range(members[0].ndim))
        sizes = dict(enumerate(members[0].shape))
        return Factors((dims,), ((),), sizes, reduced=dict.fromkeys(dims, "inner"))

    return grouped(*lists_of([tensors]), one).but(local=local)


def by_axes(call: Any) -> dict[Axes, list[int]]:
    """Numbers of the tensors that are split, by the axes that split them."""
    groups: dict[Axes, list[int]] = {}
    for i, piece in enumerate(call.inputs):
        axes = tuple(sorted(piece.layout.sharded))
        if axes:
            groups.setdefault(axes, []).append(i)
    return groups


def together(call: Any, values: list[Tensor], op: str, groups: dict[Axes, list[int]]) -> list[Tensor]:
    """The values of split tensors, reduced over their axes."""
    out = list(values)
    for axes, members in groups.items():
        for dtype in dict.fromkeys(values[i].dtype for i in members):
            alike = [i for i in members if values[i].dtype == dtype]
            done = call.reach.all_reduce(torch.stack([values[i] for i in alike]), op, axes)
            for i, value in zip(alike, done.unbind(), strict=True):
                out[i] = value
    return out


def powers(x: Tensor, order: float) -> Tensor:
    """The sum of |x| to the power of ``order``, in at least float32."""
    x = x.to(wide(x.dtype))
    if order == 0:
        return (x != 0).sum().to(x.dtype if not x.is_complex() else x.real.dtype)
    return torch.linalg.vector_norm(x, order) ** order


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def root(x: Tensor, order: float) -> Tensor:
    """x to the power of 1/order; its gradient at 0 is 0, as that of a norm."""
    if order in (0, 1):
        return x
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** (1 / order))


@rule(torch._foreach_norm, exact=True, floats=True)
def foreach_norm(input: Sequence[Arg], ord: float = 2, dtype: Any = None) -> Factors:
    """each tensor to its norm"""
    if ord in (math.inf, -math.inf):
        return each_to_number(input, extreme_of_sizes)
    if ord < 0:
        raise NoRule(f"a norm of order {ord}")
    return each_to_number(input, norms)


def norms(call: Any) -> Callable[..., list[Tensor]]:
    groups = by_axes(call)

    def run(input: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> tuple[Tensor, ...]:
        out = list(torch._foreach_norm(input, ord, dtype=dtype))
        split = [i for members in groups.values() for i in members]
        sums = list(out)
        for i in split:
            sums[i] = powers(input[i] if dtype is None else input[i].to(dtype), ord)
        sums = together(call, sums, "sum", groups)
        for i in split:
            out[i] = root(sums[i], ord).to(out[i].dtype)
        return out

    return run if groups else torch._foreach_norm


@rule(torch._foreach_powsum, exact=True, floats=True)
def foreach_powsum(input: Sequence[Arg], ord: float = 2, dtype: Any = None) -> Factors:
    """each tensor to the sum of its powers"""
    if not 0 <= ord < math.inf:
        raise NoRule(f"powers of order {ord}")

    def local(call: Any) -> Callable[..., list[Tensor]]:
        groups = by_axes(call)

        def run(input: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> tuple[Tensor, ...]:
            return together(call, list(torch._foreach_powsum(input, ord, dtype=dtype)), "sum", groups)

        return run

    return each_to_number(input, local)


def extreme_of_sizes(call: Any) -> Callable[..., list[Tensor]]:
    """The largest or smallest absolute value of each tensor."""
    groups = by_axes(call)

    def run(input: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> tuple[Tensor, ...]:
        sizes = [x.abs() if dtype is None else x.abs().to(dtype) for x in input]
        return Extreme.of(call, sizes, ord > 0, groups)

    return run


@rule(torch._foreach_max, exact=True)
def foreach_max(input: Sequence[Arg]) -> Factors:
    """each tensor to its largest element"""

    def local(call: Any) -> Callable[..., list[Tensor]]:
        groups = by_axes(call)
        return lambda input: Extreme.of(call, list(input), True, groups)

    return each_to_number(input, local)


class Extreme:
    """max or min over all elements of tensors in pieces; the gradient is shared evenly by all that are equal to it."""

    @staticmethod
    def of(call: Any, tensors: list[Tensor], largest: bool, groups: dict[Axes, list[int]]) -> list[Tensor]:
        op = "max" if largest else "min"
        found = together(call, [Extreme.local(x.detach(), largest) for x in tensors], op, groups)
        if not any(x.requires_grad for x in tensors):
            return found
        hits = [(x.detach() == m) | (m.isnan() & x.detach().isnan()) for x, m in zip(tensors, found, strict=True)]
        counts = together(call, [h.sum().to(m.dtype) for h, m in zip(hits, found, strict=True)], "sum", groups)
        shares = [
            torch.where(h, x - x.detach(), 0.0).sum() / n for x, h, n in zip(tensors, hits, counts, strict=True)
        ]
        return [m + s for m, s in zip(found, together(call, shares, "sum", groups), strict=True)]

    @staticmethod
    def local(x: Tensor, largest: bool) -> Tensor:
        """amax or amin; of nothing, what any element beats."""
        if x.numel():
            return x.amax() if largest else x.amin()
        info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        worst = (-math.inf if largest else math.inf) if x.is_floating_point() else (info.min if largest else info.max)
        return x.new_full((), worst)
