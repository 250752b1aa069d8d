"""Scans, sorting and quantiles: the dim along which they work stays whole, the others pass
through."""

from __future__ import annotations

from typing import Any

import torch

from ops.dims import FIRST, PRODUCT, front, fronts, named, shaped, tensors_in, without
from ops.empty_pieces import padded_if_empty, zeros_if_empty
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.reduction.sum import reduced_dims, reduction
from ops.registry import Function, rule


def along(input: Arg, dim: Any, results: int = 1, **options: Any) -> Factors:
    """Results of the input's shape; ``dim`` stays whole."""
    if not isinstance(dim, int):
        raise NoRule("a dim that is no number")
    whole = set(reduced_dims(input, dim))
    return pointwise_factors([input], results, unsplittable=whole, **options)


@rule(torch.cumsum)
def cumsum(input: Arg, dim: int, *, dtype: Any = None, out: None = None) -> Factors:
    """linear; the dim stays whole"""
    return along(input, dim, linear_terms=FIRST)


def _scan(
    *funcs: Function, results: int = 1, default: int | None = -1, doc: str, **options: Any
) -> None:
    """Registers scans along one dim. ``default``: the dim if none is given."""

    @rule(*funcs, doc=doc)
    def factors(input: Arg, dim: Any = default, *args: Any, **words: Any) -> Factors:
        return along(input, dim, results, **options)


_scan(
    torch.cumprod, torch.logcumsumexp, default=None, doc="the dim stays whole",
    local=padded_if_empty,
)  # fmt: skip
_BOTH = "values and indices; the dim stays whole"
_scan(torch.cummax, torch.cummin, results=2, default=None, doc=_BOTH)
_scan(torch.sort, results=2, doc=_BOTH)
_scan(torch.argsort, doc="indices; the dim stays whole")
_scan(torch.msort, default=0, doc="sorted along the first dim, which stays whole")


@rule(torch.topk)
def topk(input: Arg, k: int, dim: int = -1, *flags: bool, **words: Any) -> Factors:
    """values and indices; the dim stays whole"""
    f = reduction(input, dim, True, None)
    kept = tuple("k" if letter is None else letter for letter in f.outputs[0])
    return f.replace(outputs=(kept, kept), sizes={**f.sizes, "k": k})


@rule(torch.mode)
def mode(input: Arg, dim: int = -1, keepdim: bool = False) -> Factors:
    """values and indices; the dim stays whole"""
    return reduction(input, dim, keepdim, None, results=2)


@rule(torch.kthvalue)
def kthvalue(input: Arg, k: int, dim: int = -1, keepdim: bool = False) -> Factors:
    """values and indices; the dim stays whole"""
    return mode(input, dim, keepdim)


@rule(torch.median, torch.nanmedian)
def median(input: Arg, dim: Any = None, keepdim: bool = False) -> Factors:
    """of a dim, with its index, or of all: whole"""
    return reduction(input, dim, keepdim, None, results=1 if dim is None else 2)


@rule(torch.quantile, torch.nanquantile)
def quantile(
    input: Arg, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear",
    out: None = None,
) -> Factors:  # fmt: skip
    """the dim stays whole; a list of quantiles is a dim in front"""
    f = reduction(input, dim, keepdim, None, local=zeros_if_empty)
    if isinstance(q, Arg):
        kept = f.outputs[0]
        names: tuple[Any, ...] = tuple(f"q{i}" for i in range(q.ndim))
        f = f.replace(
            inputs=(*f.inputs, names),
            outputs=((*names, *kept),),
            sizes={**f.sizes, **dict(zip(names, q.shape, strict=True))},
            unsplittable=set(names),
        )
    if keepdim and dim is None:
        raise NoRule("quantile of all, with dims kept")
    return f


@rule(*named("diff"), exact=True)
def diff(input: Arg, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Factors:
    """linear; the dim is whole"""
    given = tensors_in(input, prepend, append)
    at = front(dim, input.ndim)
    ins = [without(t, [at]) for t in given]
    terms = tuple({i} for i in range(len(given)))
    return shaped(torch.diff, (input, n, at, prepend, append), {}, ins, ins[0], linear_terms=terms)


@rule(torch.gradient, exact=True)
def gradient(input: Arg, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Factors:
    """linear; the dims along which differences are taken are whole"""
    places = tensors_in(spacing)
    dims = without(input, range(input.ndim) if dim is None else fronts(dim, input.ndim))
    words = {"spacing": spacing, "dim": dim, "edge_order": edge_order}
    words = {k: v for k, v in words.items() if v is not None}
    ins = [dims, *((None,) * t.ndim for t in places)]
    return shaped(torch.gradient, (input,), words, ins, dims, linear_terms=FIRST)


def _areas(func: Function, *others: Function, gone: bool) -> None:
    """Registers trapezoid sums. ``gone``: the dim is summed over."""

    @rule(func, *others, exact=True, doc="linear in both; the dim is whole")
    def factors(y: Arg, x: Any = None, *, dx: Any = None, dim: int = -1) -> Factors:
        at = front(dim, y.ndim)
        places = [] if x is None or x.ndim == 1 else [x]
        if places and x.ndim > y.ndim:
            raise NoRule("places of more dims than values")
        f = pointwise_factors([y, *places])
        bare = [tuple(None if d == at else d for d in dims) for dims in (*f.inputs, *f.outputs)]
        ins = [*bare[:-1], *([(None,)] if x is not None and x.ndim == 1 else [])]
        out = (*bare[-1][:at], *bare[-1][at + 1 :]) if gone else bare[-1]
        args, terms = ((y,), FIRST) if x is None else ((y, x), PRODUCT)
        return shaped(func, args, {"dim": dim}, ins, out, linear_terms=terms)


_areas(torch.trapezoid, torch.trapz, gone=True)
_areas(torch.cumulative_trapezoid, gone=False)
