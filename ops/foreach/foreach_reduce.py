"""Reductions of each tensor of a list to a number: _foreach_norm, _foreach_powsum, _foreach_max.

One all-reduce combines the pieces of all tensors that are split by the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disttensor.core.layout import Axes
from ops.dtypes import root
from ops.factors import Arg, Factors, NoRule
from ops.foreach.foreach import grouped, lists_of
from ops.reduction.max_min import Extreme, local_extreme, ties
from ops.reduction.norm_var import powers
from ops.registry import rule

Groups = dict[Axes, list[int]]


def each_to_number(tensors: Sequence[Arg], reduce: Callable[..., Sequence[Tensor]]) -> Factors:
    """Returns the factors of a reduction of every tensor over all its dims. If some are split,
    ``reduce`` combines the pieces; it gets the call and ``by_axes`` before the arguments."""

    def one(members: Sequence[Arg]) -> Factors:
        dims = tuple(range(members[0].ndim))
        return Factors((dims,), ((),), reduced=dict.fromkeys(dims, "inner"))

    def local(call: Any) -> Callable[..., Sequence[Tensor]]:
        groups = by_axes(call)
        return partial(reduce, call, groups) if groups else call.func

    return grouped(*lists_of([tensors]), one).replace(local=local)


def by_axes(call: Any) -> Groups:
    """Returns numbers of the tensors that are split, by the axes that split them."""
    groups: Groups = {}
    for i, piece in enumerate(call.inputs):
        axes = tuple(sorted(piece.layout.sharded))
        if axes:
            groups.setdefault(axes, []).append(i)
    return groups


def together(call: Any, values: Sequence[Tensor], op: str, groups: Groups) -> list[Tensor]:
    """Returns the values of split tensors, reduced over their axes."""
    out = list(values)
    for axes, members in groups.items():
        for dtype in dict.fromkeys(values[i].dtype for i in members):
            alike = [i for i in members if values[i].dtype == dtype]
            stack = torch.stack([values[i] for i in alike])
            if op == "sum":
                done = call.collectives.psum(stack, axes)
            else:
                done = call.collectives.all_reduce(stack, op, axes)
            for i, value in zip(alike, done.unbind(), strict=True):
                out[i] = value
    return out


# Norms --------------------------------------------------------------------------------------------


@rule(torch._foreach_norm, exact=True, floats=True)
def foreach_norm(input: Sequence[Arg], ord: float = 2, dtype: Any = None) -> Factors:
    """each tensor to its norm"""
    if any(not (x.dtype.is_floating_point or x.dtype.is_complex) for x in input):
        raise NoRule("norms of integers")
    if ord in (math.inf, -math.inf):
        refuse_nothing(input)
        return each_to_number(input, extreme_sizes)
    if ord < 0:
        raise NoRule(f"a norm of order {ord}")
    return each_to_number(input, norms)


def norms(
    call: Any, groups: Groups, input: Sequence[Tensor], ord: float = 2, dtype: Any = None
) -> tuple[Tensor, ...]:
    """Returns norms of the pieces to the power of the order, added up, and its root."""
    split = [i for members in groups.values() for i in members]
    given = [dtype or x.dtype for x in input]
    small = [d.itemsize < 4 for d in given]  # squares of small floats overflow
    if all(small):
        dtype = torch.float32
    elif any(small):
        input = [x.float() if s else x for x, s in zip(input, small, strict=True)]
    out = list(torch._foreach_norm(list(input), ord, dtype=dtype))
    for i in split:
        if ord and out[i].requires_grad:  # the gradient of a norm is lost where it is infinite
            x = input[i].abs() if input[i].is_complex() else input[i]
            out[i] = powers(x.to(out[i].dtype), ord).sum()
        else:
            out[i] = out[i] ** ord if ord else out[i]
    out = together(call, out, "sum", groups)
    for i in split:
        out[i] = root(out[i], ord) if ord else out[i]
    return tuple([x.to(d) if s else x for x, d, s in zip(out, given, small, strict=True)])


@rule(torch._foreach_powsum, exact=True, floats=True)
def foreach_powsum(input: Sequence[Arg], ord: float = 2, dtype: Any = None) -> Factors:
    """each tensor to the sum of its powers"""
    if not 0 <= ord < math.inf:
        raise NoRule(f"powers of order {ord}")

    def sums(call: Any, groups: Groups, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(together(call, torch._foreach_powsum(*args, **kwargs), "sum", groups))

    return each_to_number(input, sums)


# Largest elements ---------------------------------------------------------------------------------


def refuse_nothing(tensors: Sequence[Arg]) -> None:
    if any(not t.numel() for t in tensors):
        raise NoRule("no element is the largest of none")


def extreme_sizes(
    call: Any, groups: Groups, input: Sequence[Tensor], ord: float = 2, dtype: Any = None
) -> tuple[Tensor, ...]:
    """Returns the largest or smallest absolute value of each tensor."""
    sizes = [x.abs() if dtype is None else x.abs().to(dtype) for x in input]
    return extremes(call, groups, sizes, ord > 0)


@rule(torch._foreach_max, exact=True)
def foreach_max(input: Sequence[Arg]) -> Factors:
    """each tensor to its largest element"""
    refuse_nothing(input)
    return each_to_number(input, extremes)


def extremes(
    call: Any, groups: Groups, tensors: Sequence[Tensor], largest: bool = True
) -> tuple[Tensor, ...]:
    """Returns the largest (smallest) element of each tensor, of which each rank has a piece."""
    op = "max" if largest else "min"
    mine = [local_extreme(x.detach(), tuple(range(x.ndim)), largest).view(()) for x in tensors]
    found = together(call, mine, op, groups)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return tuple(found)
    ours = [ties(x, m).sum().to(m.dtype) for x, m in zip(tensors, found, strict=True)]
    counts = together(call, ours, "sum", groups)
    axes_of = {i: axes for axes, members in groups.items() for i in members}
    return tuple(
        Extreme.apply(x, m, counts[i], (), call.collectives, axes_of.get(i, ()))
        for i, (x, m) in enumerate(zip(tensors, found, strict=True))
    )
