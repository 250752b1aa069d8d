"""max and min: values, indices, ties. If a reduced dim is split, the local function compares the
candidates of the ranks.

Gradients are the same as torch's. For ``amax``, ``aminmax`` and ``max()`` all elements that tie, on
all ranks, share the gradient evenly; for ``max(dim)`` the element with the returned index gets it,
the lowest. The first NaN wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.core.layout import Axes
from disttensor.core.placement import neutral_element
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import Collectives, LocalCall
from ops.reduction.sum import inner, reduced_dims, reduction
from ops.registry import rule

Tensor = torch.Tensor
NOWHERE = torch.iinfo(torch.int64).max


def check_not_empty(name: str, input: Arg, dim: Any) -> tuple[int, ...]:
    """Returns the reduced dims. Raises NoRule for a reduction of no elements, so that torch raises
    its error."""
    gone = reduced_dims(input, dim)
    if any(input.shape[d] == 0 for d in gone):
        raise NoRule(f"{name} of nothing")
    return gone


def neutral(dtype: torch.dtype, largest: bool) -> Any:
    """Returns the neutral element of max (``largest``) or min."""
    return neutral_element("max" if largest else "min", dtype)


def local_extreme(x: Tensor, gone: tuple[int, ...], largest: bool) -> Tensor:
    """Returns amax or amin with the reduced dims kept, also of an empty piece."""
    if any(x.shape[d] == 0 for d in gone):
        shape = [1 if d in gone else s for d, s in enumerate(x.shape)]
        return x.new_full(shape, neutral(x.dtype, largest))
    return torch.amax(x, gone, True) if largest else torch.amin(x, gone, True)


def best_of(
    call: LocalCall, x: Tensor, gone: tuple[int, ...], largest: bool, axes: Axes, nan: bool = True,
    masked: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the extreme over all ranks, with reduced dims kept. All elements that tie share the
    gradient evenly. ``nan``: NaN ties with NaN; else the gradient of NaN is 0/0. ``masked``: the
    others get 0, also if the gradient is not finite."""
    every = call.collectives.all_gather(local_extreme(x.detach(), gone, largest), axes)
    best = torch.amax(every, 0) if largest else torch.amin(every, 0)
    if not x.requires_grad:
        return best
    found = ties if nan else torch.eq
    return Extreme.apply(x, best, None, gone, call.collectives, axes, found, masked)


def ties(x: Tensor, best: Tensor) -> Tensor:
    """Returns a mask of the elements that are equal to the best; NaN equals NaN."""
    return (x == best) | (x.isnan() & best.isnan())


class Extreme(torch.autograd.Function):
    """``best`` as a function of x: all elements that tie, on all ranks, share the gradient evenly.
    ``count``: their number; None: they are counted in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, best: Tensor, count: Tensor | None, gone: tuple[int, ...],
        collectives: Collectives, axes: Axes, ties: Callable[..., Tensor] = ties,
        masked: bool = False,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, best, count)
        ctx.with_ = gone, collectives, axes, ties, masked
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, best, count = ctx.saved_tensors
        gone, collectives, axes, ties, masked = ctx.with_
        tie = ties(x, best)
        if count is None:
            count = collectives.all_reduce(tie.sum(gone, True), "sum", axes)
        share = collectives.pvary(grad, axes) / count
        return torch.where(tie, share, 0) if masked else share * tie, *[None] * 7


def extreme_of_all(gone: tuple[int, ...], largest: bool, nan: bool) -> Callable[..., Tensor]:
    """Returns a function for ``inner``. ``nan``: as of max() and min(), whose gradient is masked;
    see ``best_of``."""

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
        best = best_of(call, x, gone, largest, axes, nan, masked=nan)
        return best.reshape(call.outputs[0].local_shape)

    return reduce


def _amax(*funcs: Any, largest: bool) -> None:
    @rule(*funcs, doc="compared inside; gradient evenly to ties")
    def factors(input: Arg, dim: Any = (), keepdim: bool = False, *, out: None = None) -> Factors:
        gone = check_not_empty(funcs[0].__name__, input, dim)
        local = inner(gone, extreme_of_all(gone, largest, nan=False))
        return reduction(input, dim, keepdim, "inner", local=local)


_amax(torch.amax, largest=True)
_amax(torch.amin, largest=False)


@rule(torch.aminmax)
def aminmax(input: Arg, *, dim: Any = None, keepdim: bool = False, out: None = None) -> Factors:
    """as amin and amax"""
    gone = check_not_empty("aminmax", input, dim)

    def reduce(call: LocalCall, axes: Axes, x: Tensor, **_: Any) -> Any:
        low, high = (extreme_of_all(gone, most, False)(call, axes, x) for most in (False, True))
        return torch.return_types.aminmax((low, high))

    return reduction(input, dim, keepdim, "inner", results=2, local=inner(gone, reduce))


def candidate(
    x: Tensor, gone: tuple[int, ...], call: LocalCall, largest: bool
) -> tuple[Tensor, Tensor]:
    """Returns this rank's best along the reduced dims (one, or all): (value, in the graph of x; its
    global index), with the reduced dims removed. For an empty piece: values that never win."""
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
    """Returns (value, index) of the extreme over all ranks: the lowest index of those that tie."""
    mine, place = candidate(x, gone, call, largest)
    values, places = (call.collectives.all_gather(t, axes) for t in (mine, place))
    data = values.detach()
    best = torch.amax(data, 0) if largest else torch.amin(data, 0)
    where = torch.where(ties(data, best), places, NOWHERE)
    if mine.requires_grad:  # the gradient goes to the rank that wins
        best = values.gather(0, where.argmin(0, keepdim=True)).squeeze(0)
    return best, where.amin(0)


def _with_index(func: Any, result: Any, largest: bool) -> None:
    @rule(func, doc="compared inside, the lowest index of those that tie")
    def factors(input: Arg, dim: Any = None, keepdim: bool = False, *, out: None = None) -> Factors:
        if isinstance(dim, Arg):  # the elementwise maximum of two tensors
            return pointwise_factors([input, dim])
        gone = check_not_empty(func.__name__, input, dim)
        if dim is None:
            local = inner(gone, extreme_of_all(gone, largest, nan=True))
            return reduction(input, None, False, "inner", local=local)

        def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Any:
            shape = call.outputs[0].local_shape
            return result([t.reshape(shape) for t in winner(call, x, gone, largest, axes)])

        return reduction(input, dim, keepdim, "inner", results=2, local=inner(gone, reduce))


_with_index(torch.max, torch.return_types.max, largest=True)
_with_index(torch.min, torch.return_types.min, largest=False)


def _arg(func: Any, largest: bool) -> None:
    @rule(func, doc="the index in the whole tensor (flat without dim)")
    def factors(input: Arg, dim: Any = None, keepdim: bool = False) -> Factors:
        gone = check_not_empty(func.__name__, input, dim)

        def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
            index = winner(call, x.detach(), gone, largest, axes)[1]
            return index.reshape(call.outputs[0].local_shape)

        return reduction(input, dim, keepdim, "inner", local=inner(gone, reduce))


_arg(torch.argmax, largest=True)
_arg(torch.argmin, largest=False)
