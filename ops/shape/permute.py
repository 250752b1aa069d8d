"""Dims in another order: transpose, permute, movedim, .T; diagonals and windows of a dim."""

from __future__ import annotations

from typing import Any

import torch

from ops.dims import front, fronts, letters_of, moved, named, numbers, replaced
from ops.factors import Arg, Factors, Letter, NoRule
from ops.registry import rule


def getter(name: str) -> Any:
    """Returns the function that torch calls for the property ``name`` of a tensor."""
    return getattr(torch.Tensor, name).__get__


@rule(*named("transpose", "swapaxes", "swapdims"), exact=True, sizes="letters")
def transpose(input: Arg, dim0: int, dim1: int) -> Factors:
    """the two dims change places"""
    dims = list(letters_of(input))
    if dims:
        a, b = front(dim0, input.ndim), front(dim1, input.ndim)
        dims[a], dims[b] = dims[b], dims[a]
    return moved(input, tuple(dims))


@rule(*named("t"), getter("T"), getter("H"), exact=True, sizes="letters")
def t(input: Arg, owner: Any = None) -> Factors:
    """the dims in reverse (.T, .H)"""
    return moved(input, letters_of(input)[::-1])


@rule(*named("adjoint"), getter("mT"), getter("mH"), exact=True, sizes="letters")
def adjoint(input: Arg, owner: Any = None) -> Factors:
    """the last two dims change places (.mT, .mH)"""
    dims = letters_of(input)
    return moved(input, (*dims[:-2], *dims[-2:][::-1]))


@rule(*named("permute"), exact=True, sizes="letters")
def permute(input: Arg, *dims: Any) -> Factors:
    """the dims in another order"""
    order = fronts(numbers(dims), input.ndim)
    return moved(input, order)


@rule(*named("movedim", "moveaxis"), exact=True, sizes="letters")
def movedim(input: Arg, source: Any, destination: Any) -> Factors:
    """some dims move, the others keep their order"""
    src, dst = fronts(source, input.ndim), fronts(destination, input.ndim)
    rest = iter(d for d in range(input.ndim) if d not in src)
    at = dict(zip(dst, src, strict=True))
    return moved(input, tuple(at[d] if d in at else next(rest) for d in range(input.ndim)))


@rule(*named("diagonal"), exact=True)
def diagonal(input: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Factors:
    """the two dims are whole and become one, the last"""
    a, b = front(dim1, input.ndim), front(dim2, input.ndim)
    rows, cols = input.shape[a], input.shape[b]
    length = max(0, min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols))
    kept = tuple(d for d in range(input.ndim) if d not in (a, b))
    return moved(input, (*kept, "diagonal"), {"diagonal": length})


@rule(*named("unfold"), exact=True)
def unfold(input: Arg, dim: int, size: int, step: int) -> Factors:
    """windows of ``dim``, which is whole; their elements are a new last dim"""
    at = front(dim, input.ndim)
    if not input.ndim:
        raise NoRule("unfold of a number")
    sizes: dict[Letter, int] = {"windows": (input.shape[at] - size) // step + 1, "size": size}
    return moved(input, (*replaced(input, at, "windows"), "size"), sizes)
