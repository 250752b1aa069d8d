"""Reductions over dims: the reduced dims give a pending reduction when they are split."""

from __future__ import annotations

from typing import Any

import torch

from ops.factors import Arg, Factors
from ops.registry import rule


def reduced_dims(input: Arg, dim: Any) -> tuple[int, ...]:
    """The dims that ``dim`` (None, a number, a list) names, counted from the front."""
    if dim is None or (isinstance(dim, (list, tuple)) and not len(dim)):
        return tuple(range(input.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % input.ndim if input.ndim else 0 for d in dims)


def reduction(input: Arg, dim: Any, keepdim: bool, kind: str, **options: Any) -> Factors:
    """Factors of a reduction of the kept letters 0..n-1; ``kind`` is what is pending, or "inner"."""
    gone = reduced_dims(input, dim)
    dims = tuple(range(input.ndim))
    kept: tuple[Any, ...] = tuple(None if d in gone else d for d in dims) if keepdim else tuple(d for d in dims if d not in gone)
    return Factors((dims,), (kept,), dict(enumerate(input.shape)), reduced=dict.fromkeys(gone, kind), **options)


@rule(torch.sum)
def sum(input: Arg, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Factors:
    """reduced dims: P(sum)"""
    return reduction(input, dim, keepdim, "sum", terms=(frozenset({0}),))
