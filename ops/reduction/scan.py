"""Scans, sorting and quantiles: the dim they go along stays whole, the others pass through."""

from __future__ import annotations

from typing import Any

import torch

from ops.empty_pieces import or_zeros
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.reduction.sum import linear_in, reduced_dims, reduction
from ops.registry import rule


def along(input: Arg, dim: Any, results: int = 1, **options: Any) -> Factors:
    """Results of the input's shape; ``dim`` stays whole."""
    if not isinstance(dim, int):
        raise NoRule("a dim that is no number")
    dims = tuple(range(input.ndim))
    sizes: dict[Any, int] = dict(enumerate(input.shape))
    whole = frozenset(reduced_dims(input, dim))
    return Factors((dims,), (dims,) * results, sizes, whole=whole, **options)


@rule(torch.cumsum)
def cumsum(input: Arg, dim: int, *, dtype: Any = None, out: None = None) -> Factors:
    """linear; the dim stays whole"""
    return along(input, dim, terms=linear_in(input, dtype))


@rule(torch.cumprod, torch.logcumsumexp)
def cumprod(input: Arg, dim: int, *, dtype: Any = None, out: None = None) -> Factors:
    """the dim stays whole"""
    return along(input, dim)


@rule(torch.cummax, torch.cummin)
def cummax(input: Arg, dim: int, *, out: None = None) -> Factors:
    """values and indices; the dim stays whole"""
    return along(input, dim, results=2)


@rule(torch.sort)
def sort(
    input: Arg, dim: int = -1, descending: bool = False, stable: Any = None, *, out: None = None
) -> Factors:
    """values and indices; the dim stays whole"""
    return along(input, dim, results=2)


@rule(torch.argsort)
def argsort(input: Arg, dim: int = -1, descending: bool = False, stable: bool = False) -> Factors:
    """indices; the dim stays whole"""
    return along(input, dim)


@rule(torch.msort)
def msort(input: Arg, *, out: None = None) -> Factors:
    """sorted along the first dim, which stays whole"""
    return along(input, 0)


@rule(torch.topk)
def topk(
    input: Arg,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    out: None = None,
) -> Factors:
    """values and indices; the dim stays whole"""
    gone = reduced_dims(input, dim)
    dims = tuple(range(input.ndim))
    kept = tuple("k" if d in gone else d for d in dims)
    sizes: dict[Any, int] = {**dict(enumerate(input.shape)), "k": k}
    return Factors((dims,), (kept, kept), sizes)


@rule(torch.kthvalue)
def kthvalue(
    input: Arg, k: int, dim: int = -1, keepdim: bool = False, *, out: None = None
) -> Factors:
    """values and indices; the dim stays whole"""
    return reduction(input, dim, keepdim, None, results=2)


@rule(torch.mode)
def mode(input: Arg, dim: int = -1, keepdim: bool = False, *, out: None = None) -> Factors:
    """values and indices; the dim stays whole"""
    return reduction(input, dim, keepdim, None, results=2)


@rule(torch.median, torch.nanmedian)
def median(input: Arg, dim: Any = None, keepdim: bool = False, *, out: None = None) -> Factors:
    """of a dim, with its index, or of all: whole"""
    return reduction(input, dim, keepdim, None, results=1 if dim is None else 2)


@rule(torch.quantile, torch.nanquantile)
def quantile(
    input: Arg, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear",
    out: None = None,
) -> Factors:  # fmt: skip
    """the dim stays whole; a list of quantiles is a dim in front"""
    f = reduction(input, dim, keepdim, None, local=or_zeros)
    if isinstance(q, Arg):
        kept = f.outputs[0]
        names: tuple[Any, ...] = tuple(f"q{i}" for i in range(q.ndim))
        f = f.but(
            inputs=(*f.inputs, names),
            outputs=((*names, *kept),),
            sizes={**f.sizes, **dict(zip(names, q.shape, strict=True))},
            whole=frozenset(names),
        )
    if keepdim and dim is None:
        raise NoRule("quantile of all, with dims kept")
    return f


@rule(torch.cosine_similarity)
def cosine_similarity(x1: Arg, x2: Arg, dim: int = 1, eps: float = 1e-8) -> Factors:
    """the dim stays whole"""
    if x1.shape != x2.shape:
        raise NoRule("cosine_similarity of shapes that broadcast")
    f = reduction(x1, dim, False, None)
    return f.but(inputs=f.inputs * 2)
