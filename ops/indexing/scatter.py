"""Writing along a dim: scatter, index_add, index_copy, index_fill, masked_fill and related
functions.

The dim along which elements are written is whole in the target, and so is a dim whose sizes differ
in index, source and target; other dims pass through. Adding or copying is linear in target and
source together. If elements are added, the rows of index and source may be split: each rank adds
its own rows, and the result is pending.
"""

from __future__ import annotations

from typing import Any

import torch

from ops.dims import (
    SUM,
    front,
    fronts,
    letters_of,
    moved,
    named,
    replaced,
    shaped,
    tensors_in,
    without,
)
from ops.dtypes import HALVES
from ops.factors import Arg, Factors, Letter, NoRule, Terms, pointwise_factors
from ops.registry import rule

ADDS = ("sum", "add")


def along(target: Arg, dim: int, others: list[Arg], terms: Terms, adds: bool = False) -> Factors:
    """Returns the factors of writing along ``dim``; ``others`` have the target's dims (an index, a
    source). ``adds``: elements are added to the target, so each rank may add its own rows."""
    if not target.ndim or any(t.ndim != target.ndim for t in others):
        raise NoRule("writing into a number")
    at = front(dim, target.ndim)
    dims = letters_of(target)
    whole = {d for d in dims if d == at or any(t.shape[d] != target.shape[d] for t in others)}
    rows = {t.shape[at] for t in others}
    row = "row" if adds and terms and len(rows) == 1 else None
    own = tuple(row if d == at else None if d in whole else d for d in dims)
    reduced: dict[Letter, str] = {row: "sum"} if row else {}
    inputs = (dims, *(own for _ in others))
    return Factors(inputs, (dims,), {}, reduced, whole, linear_terms=terms)


def together(*tensors: Any) -> Terms:
    """Returns the terms of a call that is linear in these tensors together: none if a number, or a
    tensor of bools, is among them."""
    if not all(isinstance(t, Arg) and t.dtype is not torch.bool for t in tensors):
        return ()
    return tuple({t.index} for t in tensors)


@rule(torch.scatter)
def scatter(
    input: Arg, dim: int, index: Arg, src: Any = None, value: Any = None, *, reduce: Any = None
) -> Factors:
    """the dim is whole"""
    source = src if src is not None else value
    solid = isinstance(source, Arg) and source.ndim == input.ndim
    terms = together(input, source) if solid and (reduce is None or reduce in ADDS) else ()
    f = along(input, dim, [index, source] if solid else [index], terms, reduce in ADDS)
    return f.replace(inputs=(*f.inputs, ())) if isinstance(source, Arg) and not solid else f


@rule(torch.scatter_add)
def scatter_add(input: Arg, dim: int, index: Arg, src: Arg) -> Factors:
    """the dim is whole in the target; split rows of index and source: P(sum)"""
    return along(input, dim, [index, src], together(input, src), True)


@rule(torch.scatter_reduce)
def scatter_reduce(
    input: Arg, dim: int, index: Arg, src: Arg, reduce: str, *, include_self: bool = True
) -> Factors:
    """the dim is whole"""
    adds = reduce in ADDS
    terms = together(input, src) if adds else ()
    # Without self, a rank would keep its row where only the index of another rank hits it.
    return along(input, dim, [index, src], terms, adds and include_self)


def along_index(
    input: Arg, dim: int, index: Arg, source: Any, terms: Terms, adds: bool = False
) -> Factors:
    """Returns the factors of writing rows numbered by a vector."""
    solid = isinstance(source, Arg) and source.ndim == input.ndim
    if isinstance(source, Arg) and not solid and source.ndim:
        raise NoRule("a source with other dims")
    at = front(dim, input.ndim)
    fits = solid and source.shape[at : at + 1] == index.shape
    f = along(input, dim, [source] if solid else [], terms, adds and fits)
    others = f.inputs[1:] if solid else ((),) if isinstance(source, Arg) else ()
    rows = ("row",) if f.reduced else (None,) * index.ndim
    return f.replace(inputs=(f.inputs[0], rows, *others))


@rule(torch.index_copy)
def index_copy(input: Arg, dim: int, index: Arg, source: Arg) -> Factors:
    """the dim is whole"""
    return along_index(input, dim, index, source, together(input, source))


@rule(torch.index_add)
def index_add(input: Arg, dim: int, index: Arg, source: Arg, *, alpha: Any = 1) -> Factors:
    """the dim is whole in the target; split rows of index and source: P(sum)"""
    return along_index(input, dim, index, source, together(input, source), True)


@rule(torch.index_reduce)
def index_reduce(
    input: Arg, dim: int, index: Arg, source: Arg, reduce: str, *, include_self: bool = True
) -> Factors:
    """the dim is whole"""
    if reduce == "prod" and input.dtype in HALVES:
        raise NoRule("torch's kernel fails on pieces of one column in this dtype")
    return along_index(input, dim, index, source, ())


@rule(torch.index_fill)
def index_fill(input: Arg, dim: int, index: Arg, value: Any) -> Factors:
    """the dim is whole"""
    return along_index(input, dim, index, value, ())


@rule(*named("select_scatter"), exact=True)
def select_scatter(input: Arg, src: Arg, dim: int, index: int) -> Factors:
    """the dim is whole"""
    at = front(dim, input.ndim)
    dims = letters_of(input)
    f = moved(input, dims, unsplittable={at}, linear_terms=together(input, src))
    return f.replace(inputs=(dims, replaced(input, at)))


@rule(*named("slice_scatter"), exact=True)
def slice_scatter(
    input: Arg, src: Arg, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Factors:
    """the dim is whole"""
    return along(input, dim, [src], together(input, src))


@rule(torch.masked_fill)
def masked_fill(input: Arg, mask: Arg, value: Any) -> Factors:
    """elementwise; the number that is filled in is not linear"""
    return pointwise_factors(tensors_in(input, mask, value))


@rule(*named("diagonal_scatter"), exact=True)
def diagonal_scatter(
    input: Arg, src: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Factors:
    """linear in both together; the two dims are whole"""
    gone = fronts((dim1, dim2), input.ndim)
    dims = without(input, gone)
    rest = (*(d for d in dims if d is not None), None)
    return shaped(
        torch.diagonal_scatter, (input, src, offset, dim1, dim2), {}, [dims, rest], dims,
        linear_terms=SUM,
    )  # fmt: skip
