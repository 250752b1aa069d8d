"""max and min: values, indices, ties. Where a reduced dim is split, the ranks' candidates are
compared inside.

Gradients as torch gives them: of ``amax``, ``aminmax`` and ``max()`` evenly to all elements that
tie, over all ranks; of ``max(dim)`` to the one that the index names, the lowest. NaN wins, the
first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.core.layout import Axes
from disttensor.core.placement import neutral_element
from ops.factors import Arg, Factors, pointwise_factors
from ops.infer import NoRule
from ops.local import Collectives, LocalCall
from ops.reduction.sum import inner, reduced_dims, reduction
from ops.registry import rule

Tensor = torch.Tensor
NOWHERE = torch.iinfo(torch.int64).max


def check_not_empty(name: str, input: Arg, dim: Any) -> tuple[int, ...]:
    """Returns the reduced dims. Raises NoRule if nothing is reduced into one: torch says what is
    wrong."""
    gone = reduced_dims(input, dim)
    if any(input.shape[d] == 0 for d in gone):
        raise NoRule(f"{name} of nothing")
    return gone


def neutral(dtype: torch.dtype, largest: bool) -> Any:
    """Returns the neutral element of max (``largest``) or min."""
    return neutral_element("max" if largest else "min", dtype)


def local_extreme(x: Tensor, gone: tuple[int, ...], largest: bool) -> Tensor:
    """amax or amin with the reduced dims kept, also of an empty piece."""
    if any(x.shape[d] == 0 for d in gone):
        shape = [1 if d in gone else s for d, s in enumerate(x.shape)]
        return x.new_full(shape, neutral(x.dtype, largest))
    return torch.amax(x, gone, True) if largest else torch.amin(x, gone, True)


def best_of(call: LocalCall, x: Tensor, gone: tuple[int, ...], largest: bool, axes: Axes) -> Tensor:
    """Returns the extreme over all ranks, reduced dims kept, gradient evenly to all that tie."""
    every = call.collectives.all_gather(local_extreme(x.detach(), gone, largest), axes)
    best = torch.amax(every, 0) if largest else torch.amin(every, 0)
    return Extreme.apply(x, best, None, gone, call.collectives, axes) if x.requires_grad else best


def ties(x: Tensor, best: Tensor) -> Tensor:
    """Returns where x is as good as the best; NaN is as good as NaN."""
    return (x == best) | (x.isnan() & best.isnan())


class Extreme(torch.autograd.Function):
    """``best`` as a function of x: all elements that tie, on all ranks, share the gradient evenly.
    ``count``: how many they are; None: they are counted in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, best: Tensor, count: Tensor | None, gone: tuple[int, ...],
        collectives: Collectives, axes: Axes,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, best, count)
        ctx.with_ = gone, collectives, axes
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, best, count = ctx.saved_tensors
        gone, collectives, axes = ctx.with_
        tie = ties(x, best)
        if count is None:
            count = collectives.all_reduce(tie.sum(gone, True), "sum", axes)
        share = collectives.pvary(grad, axes) / count
        return torch.where(tie, share, 0), None, None, None, None, None


def _amax(*funcs: Any, largest: bool) -> None:
    name = funcs[0].__name__

    def factors(input: Arg, dim: Any = (), keepdim: bool = False, *, out: None = None) -> Factors:
        gone = check_not_empty(name, input, dim)

        def make(call: LocalCall, axes: Axes) -> Callable[..., Tensor]:
            def extreme(x: Tensor, *_: Any, **__: Any) -> Tensor:
                best = best_of(call, x, gone, largest, axes)
                return best if keepdim else best.reshape(call.outputs[0].local_shape)

            return extreme

        return reduction(input, dim, keepdim, "inner", local=inner(gone, make))

    factors.__name__, factors.__doc__ = name, "compared inside; gradient evenly to ties"
    rule(*funcs)(factors)


_amax(torch.amax, largest=True)
_amax(torch.amin, largest=False)


@rule(torch.aminmax)
def aminmax(input: Arg, *, dim: Any = None, keepdim: bool = False, out: None = None) -> Factors:
    """as amin and amax"""
    gone = check_not_empty("aminmax", input, dim)

    def make(call: LocalCall, axes: Axes) -> Any:
        def aminmax(x: Tensor, **_: Any) -> Any:
            low, high = (best_of(call, x, gone, largest, axes) for largest in (False, True))
            shape = call.outputs[0].local_shape
            return torch.return_types.aminmax((low.reshape(shape), high.reshape(shape)))

        return aminmax

    return reduction(input, dim, keepdim, "inner", results=2, local=inner(gone, make))


def candidate(
    x: Tensor, gone: tuple[int, ...], call: LocalCall, largest: bool
) -> tuple[Tensor, Tensor]:
    """Returns this rank's best along the reduced dims (one, or all): (value, in the graph of x; its
    index in the whole; in the shape that is left). Of an empty piece: what never wins."""
    one = len(gone) == 1 and x.ndim > 1
    piece = call.inputs[0]
    shape = tuple(s for d, s in enumerate(x.shape) if d not in gone)
    if any(x.shape[d] == 0 for d in gone):
        value = x.new_full(shape, neutral(x.dtype, largest))
        if x.requires_grad:
            value = value + x.sum(gone)
        return value, torch.full(shape, NOWHERE, device=x.device)
    if one:
        value, index = (torch.max if largest else torch.min)(x, gone[0])
        return value, index + piece.local_box.offset[gone[0]]
    flat = x.reshape(-1)
    value, index = (torch.max if largest else torch.min)(flat, 0)
    place = torch.zeros_like(index)
    for at, offset, size in zip(
        torch.unravel_index(index, x.shape), piece.local_box.offset, piece.shape, strict=True
    ):
        place = place * size + (at + offset)
    return value, place


def winner(
    call: LocalCall, x: Tensor, gone: tuple[int, ...], largest: bool, axes: Axes
) -> tuple[Tensor, Tensor]:
    """(value, index) of the extreme over all ranks: the lowest index of those that tie."""
    mine, place = candidate(x, gone, call, largest)
    values = call.collectives.all_gather(mine.detach(), axes)
    places = call.collectives.all_gather(place, axes)
    best = torch.amax(values, 0) if largest else torch.amin(values, 0)
    where = torch.where(ties(values, best), places, NOWHERE).amin(0)
    if mine.requires_grad:
        best = _Pick.apply(mine, best, where == place, call.collectives, axes)
    return best, where


class _Pick(torch.autograd.Function):
    """``best`` as the value of ``mine`` where that ``won``: the gradient goes there alone."""

    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, best: Tensor, won: Tensor, collectives: Collectives, axes: Axes
    ) -> Tensor:
        ctx.save_for_backward(won)
        ctx.with_ = collectives, axes
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (won,) = ctx.saved_tensors
        collectives, axes = ctx.with_
        return torch.where(won, collectives.pvary(grad, axes), 0), None, None, None, None


def _with_index(func: Any, result: Any, largest: bool) -> None:
    name = func.__name__

    def factors(input: Arg, dim: Any = None, keepdim: bool = False, *, out: None = None) -> Factors:
        if isinstance(dim, Arg):  # the elementwise maximum of two tensors
            return pointwise_factors([input, dim])
        gone = check_not_empty(name, input, dim)

        def whole(call: LocalCall, axes: Axes) -> Any:
            def extreme(x: Tensor) -> Tensor:
                return best_of(call, x, gone, largest, axes).reshape(())

            return extreme

        def along(call: LocalCall, axes: Axes) -> Any:
            shape = call.outputs[0].local_shape

            def extreme(x: Tensor, *_: Any, **__: Any) -> Any:
                value, index = winner(call, x, gone, largest, axes)
                return result((value.reshape(shape), index.reshape(shape)))

            return extreme

        if dim is None:
            return reduction(input, None, False, "inner", local=inner(gone, whole))
        return reduction(input, dim, keepdim, "inner", results=2, local=inner(gone, along))

    factors.__name__, factors.__doc__ = name, "compared inside, the lowest index of those that tie"
    rule(func)(factors)


_with_index(torch.max, torch.return_types.max, largest=True)
_with_index(torch.min, torch.return_types.min, largest=False)


def _arg(func: Any, largest: bool) -> None:
    name = func.__name__

    def factors(input: Arg, dim: Any = None, keepdim: bool = False) -> Factors:
        gone = check_not_empty(name, input, dim)

        def make(call: LocalCall, axes: Axes) -> Any:
            shape = call.outputs[0].local_shape

            def extreme(x: Tensor, *_: Any, **__: Any) -> Tensor:
                return winner(call, x.detach(), gone, largest, axes)[1].reshape(shape)

            return extreme

        return reduction(input, dim, keepdim, "inner", local=inner(gone, make))

    factors.__name__, factors.__doc__ = name, "the index in the whole tensor (flat without dim)"
    rule(func)(factors)


_arg(torch.argmax, largest=True)
_arg(torch.argmin, largest=False)
