"""Reductions over dims: sums (pending if a reduced dim is split), mean, prod, any, all, counts.

``max``, ``argmax`` and their like are in ``ops.reduction.max_min``, ``var`` and norms in
``ops.reduction.norm_var``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from disttensor.core.layout import Axes
from ops.dims import FIRST, fronts
from ops.factors import Arg, Factors, Letter, LocalMaker, NoRule, pointwise_factors
from ops.local import LocalCall
from ops.registry import rule


def reduced_dims(input: Arg, dim: Any) -> tuple[int, ...]:
    """Returns the dims that ``dim`` (None, a number, a list) names, counted from the front."""
    if dim is None or (isinstance(dim, (list, tuple)) and not len(dim)):
        return tuple(range(input.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not isinstance(d, int):
            raise NoRule(f"a dim that is no number: {d!r}")
    gone = fronts(dims, input.ndim)
    return gone if input.ndim else ()


def reduction(
    input: Arg, dim: Any, keepdim: bool, kind: str | None, results: int = 1, **options: Any
) -> Factors:
    """Returns the factors of a reduction of the kept letters 0..n-1. ``kind``: the pending
    reduction, "inner" (the local function reduces), or None (the reduced dims stay whole)."""
    gone = reduced_dims(input, dim)
    dims = tuple(range(input.ndim))
    kept: tuple[Any, ...] = tuple(d for d in dims if d not in gone)
    if keepdim:
        kept = tuple(None if d in gone else d for d in dims)
    reduced: dict[Letter, str] = {} if kind is None else dict.fromkeys(gone, kind)
    sizes: dict[Letter, int] = dict(enumerate(input.shape))
    options.setdefault("independent", set(dims) - {*gone})
    return Factors((dims,), (kept,) * results, sizes, reduced=reduced, **options)


def split_axes(call: LocalCall, gone: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the mesh axes that split the reduced dims, in mesh order."""
    return tuple(sorted(call.axes(*gone)))


def sizes_of(call: LocalCall, gone: tuple[int, ...]) -> tuple[int, int]:
    """Returns how many elements are reduced into one: on this rank, and on all ranks."""
    piece = call.inputs[0]
    return math.prod(piece.local_shape[d] for d in gone), math.prod(piece.shape[d] for d in gone)


def inner(gone: tuple[int, ...], reduce: Callable[..., Any]) -> LocalMaker:
    """Returns a function ``local`` of Factors: it returns the torch function if the reduced dims
    are whole, else ``reduce``, which gets the call and the axes that split them before the
    arguments."""

    def local(call: LocalCall) -> Any:
        axes = split_axes(call, gone)
        return update_wrapper(partial(reduce, call, axes), reduce) if axes else call.func

    return local


@rule(torch.sum)
def sum(input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Factors:
    """reduced dims: P(sum); to bool: P(any)"""
    if dtype is torch.bool:
        return reduction(input, dim, keepdim, "any")
    return reduction(input, dim, keepdim, "sum", linear_terms=FIRST)


@rule(torch.mean)
def mean(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: None = None
) -> Factors:
    """reduced dims: P(sum) of this rank's share: its mean, times its part of the elements"""
    gone = reduced_dims(input, dim)

    def local(call: LocalCall) -> Any:
        here, there = sizes_of(call, gone)
        if here == there:
            return call.func
        func, share = call.func if here else torch.sum, here / there  # the mean of nothing is nan

        def mean(*args: Any, **kwargs: Any) -> Tensor:
            return func(*args, **kwargs) * share

        return mean

    return reduction(
        input, dim, keepdim, "sum", linear_terms=FIRST, local=local,
        independent=set(range(input.ndim)),
    )  # fmt: skip


@rule(torch.nanmean)
def nanmean(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: None = None
) -> Factors:
    """the sum and the count of the numbers that are not NaN, each reduced inside"""
    gone = reduced_dims(input, dim)

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
        sums = torch.nansum(x, gone, keepdim, dtype=dtype)
        counts = torch.isnan(x).logical_not().sum(gone, keepdim)
        return call.collectives.psum(sums, axes) / call.collectives.psum(counts, axes)

    return reduction(input, dim, keepdim, "inner", local=inner(gone, reduce))


def _pending(func: Any, kind: str, doc: str) -> None:
    @rule(func, doc=f"reduced dims: P({doc}")
    def factors(input: Arg, dim: Any = None, keepdim: bool = False, **words: Any) -> Factors:
        if kind in ("any", "all") and isinstance(dim, (list, tuple)) and not dim:
            return pointwise_factors([input])  # torch reduces no dim here
        of_bytes = {"any": "max", "all": "min"} if input.dtype is torch.uint8 else {}
        op = "any" if words.get("dtype") is torch.bool else of_bytes.get(kind, kind)
        return reduction(input, dim, keepdim, op)


_pending(torch.nansum, "sum", "sum); not linear, NaN counts as 0")
_pending(torch.count_nonzero, "sum", "sum) of counts")
_pending(torch.any, "any", "any)")
_pending(torch.all, "all", "all)")


@rule(torch.histc, floats=True)
def histc(input: Arg, bins: int = 100, min: Any = 0, max: Any = 0) -> Factors:
    """every dim: P(sum) of counts, between bounds that are given"""
    if min == max:
        raise NoRule("no rule for bounds that depend on the data")
    return reduction(input, None, False, "sum").replace(outputs=((None,),), shapes=((bins,),))


def _parts(
    call: LocalCall, x: Tensor, gone: tuple[int, ...], axes: Axes, dtype: Any = None
) -> Tensor:
    """Returns the products of all ranks, reduced dims kept, shared."""
    for d in gone:
        x = x.prod(d, keepdim=True, dtype=dtype)
    return call.collectives.all_gather(x, axes)


def _others(x: Tensor, gone: tuple[int, ...]) -> Tensor:
    """Returns for each element the product of the others of its slice. The slice may be empty."""
    out = torch.ones_like(x)
    for d in gone:
        for reverse in (False, True):
            first = F.pad(x.flip(d) if reverse else x, (0, 0) * (x.ndim - 1 - d) + (1, 0), value=1)
            before = first.cumprod(d).narrow(d, 0, x.shape[d])
            out = out * (before.flip(d) if reverse else before)
        x = x.prod(d, keepdim=True)
    return out


class _Product(torch.autograd.Function):
    """The product of ``parts`` of all ranks as a function of x. ``zeros``: how many are in each
    slice; ``whole``: all dims are reduced."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parts: Tensor, zeros: Tensor, call: LocalCall, gone: tuple[int, ...],
        axes: Axes, whole: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, parts, zeros)
        ctx.with_ = call, gone, axes, whole
        return parts.prod(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, parts, zeros = ctx.saved_tensors
        call, gone, axes, whole = ctx.with_
        if torch.is_grad_enabled():  # the gradient will be differentiated
            parts = _parts(call, x, gone, axes)
        parts, me, found = call.collectives.pvary(parts, axes), call.member(axes), zeros > 0
        others = torch.where(
            found,
            _others(x, gone) * torch.cat([parts[:me], parts[me + 1 :]]).prod(0),
            parts.prod(0).masked_fill(found, 1) / x.masked_fill(found, 1),
        )
        grad = call.collectives.pvary(grad, axes) * others.conj()
        return grad.masked_fill(zeros > 1, 0) if whole else grad, *[None] * 6


@rule(torch.prod)
def prod(input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Factors:
    """the ranks' products, collected and multiplied inside. The gradient is the product over x, as
    in torch; in a slice with zeros, the product of the others"""
    gone = reduced_dims(input, dim)

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        parts = _parts(call, x.detach(), gone, axes, dtype)
        if x.requires_grad:
            zeros = call.collectives.all_reduce((x == 0).sum(gone, True), "sum", axes)
            out = _Product.apply(x, parts, zeros, call, gone, axes, dim is None)
        else:
            out = parts.prod(0, dtype=parts.dtype)
        return out.reshape(call.outputs[0].local_shape)

    return reduction(input, dim, keepdim, "inner", local=inner(gone, reduce))
