"""Order and triangles: roll, flip, fftshift, tril, triu, diagonals, one_hot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import front, fronts, letters_of, moved, named, numbers
from ops.factors import Arg, Dims, Factors, Letter, NoRule
from ops.registry import rule
from ops.shape import permute


def _local_triangle(call: Any) -> Any:
    """Returns the triangle of a piece, whose diagonal is the part of the global diagonal in the
    piece."""
    rows, cols = call.inputs[0].local_box.offset[-2:]
    func = call.func
    shift = rows - cols
    if not shift:
        return func
    return lambda input, diagonal=0: func(input, diagonal + shift)


@rule(torch.tril, torch.triu)
def triangle(input: Arg, diagonal: int = 0) -> Factors:
    """every dim passes through, rows and columns too; zeros are zeros in any reduction"""
    if input.ndim < 2:
        raise NoRule("a triangle has two dims")
    return moved(input, letters_of(input), local=_local_triangle)


def _reorder(names: str, dims_of: Callable[..., Iterable[int]], doc: str) -> None:
    """Registers functions that reorder the elements along some dims, which are whole."""

    @rule(*named(*names.split(), places=(torch, torch.Tensor, torch.fft)), exact=True, doc=doc)
    def factors(input: Arg, *args: Any) -> Factors:
        return moved(input, letters_of(input), unsplittable={*dims_of(input, *args)})


def _rolled(input: Arg, shifts: Any, dims: Any = ()) -> Dims:
    every = not isinstance(dims, int) and not dims
    return letters_of(input) if every else fronts(dims, input.ndim)


def _shifted(input: Arg, dim: Any = None) -> Dims:
    return letters_of(input) if dim is None else fronts(dim, input.ndim)


_reorder("roll", _rolled, "rolled dims are whole")
_reorder("flip", lambda x, *dims: fronts(numbers(dims), x.ndim), "flipped dims are whole")
_reorder("fliplr", lambda x: (1,), "columns are whole")
_reorder("flipud", lambda x: (0,), "rows are whole")
_reorder("fftshift ifftshift", _shifted, "movement; the dims that are shifted stay whole")


@rule(*named("rot90"), exact=True)
def rot90(input: Arg, k: int = 1, dims: Any = (0, 1)) -> Factors:
    """the two dims are whole"""
    a, b = fronts(dims, input.ndim)
    out: list[Letter] = list(letters_of(input))
    if k % 2:
        out[a], out[b] = out[b], out[a]
    return moved(input, tuple(out), unsplittable={a, b})


@rule(*named("diag"), exact=True)
def diag(input: Arg, diagonal: int = 0) -> Factors:
    """whole"""
    if input.ndim == 1:
        n = input.shape[0] + abs(diagonal)
        return moved(input, ("rows", "cols"), {"rows": n, "cols": n})
    return permute.diagonal(input, diagonal)


@rule(*named("diag_embed"), exact=True)
def diag_embed(input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Factors:
    """the last dim is whole and becomes two"""
    n = input.shape[-1] + abs(offset)
    at = {front(dim1, input.ndim + 1): "rows", front(dim2, input.ndim + 1): "cols"}
    rest = iter(range(input.ndim - 1))
    out = tuple(at[d] if d in at else next(rest) for d in range(input.ndim + 1))
    return moved(input, out, {"rows": n, "cols": n})


@rule(F.one_hot, exact=True)
def one_hot(input: Arg, num_classes: int = -1) -> Factors:
    """a new dim of classes"""
    if num_classes < 0:
        raise NoRule("the number of classes depends on the data")
    return moved(input, (*letters_of(input), "classes"), {"classes": num_classes}, moves=False)
