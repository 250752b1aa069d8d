"""Selecting along a dim: select, narrow, index_select, gather and related functions. Look-ups of
values: isin, bucketize, searchsorted.

If the dim is split, the owner of a row returns it and the others return zeros (a pending sum); the
input is not moved. The dims of the index pass through. For select and narrow the dim is whole:
their results are views, and a write to a view has to write to the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.dims import FIRST, front, letters_of, moved, named, replaced, tensors_in
from ops.factors import Arg, Dims, Factors, Letter, NoRule
from ops.indexing.vocab_shard import Owned
from ops.registry import rule
from ops.shape.view_copy import copied

Tensor = torch.Tensor


@rule(*named("select"), exact=True)
def select(input: Arg, dim: int, index: int) -> Factors:
    """the dim is whole"""
    if not isinstance(index, int):
        raise NoRule("select by a tensor")
    at = front(dim, input.ndim)
    return moved(input, replaced(input, at))


@rule(*named("narrow"), exact=True)
def narrow(input: Arg, dim: int, start: Any, length: int) -> Factors:
    """the dim is whole, unless all of it is taken"""
    at = front(dim, input.ndim)
    if length == input.shape[at]:
        size = input.shape[at]

        def local(call: Any) -> Callable[..., Tensor]:
            mine = call.inputs[0].local_shape[at]
            return lambda input, *more, **words: input.narrow(at, 0, mine)

        if start in (0, -size):
            return moved(input, letters_of(input), local=local)
    if not isinstance(start, int):
        raise NoRule("narrow by a tensor")
    return moved(input, replaced(input, at, "taken"), {"taken": length})


rule(*named("narrow_copy"), exact=True, doc="as narrow")(copied(narrow))


@rule(*named("index_select"), exact=True)
def index_select(input: Arg, dim: int, index: Arg) -> Factors:
    """rows of a split dim come from their owners: P(sum); the index may be split"""
    if not input.ndim:
        raise NoRule("index_select of a number")
    at = front(dim, input.ndim)
    which: Letter = "index" if index.ndim else None

    def local(call: Any) -> Callable[..., Tensor]:
        if not call.axes(at):
            return call.func
        owned = Owned.of(call.inputs[0], at)
        tail = (1,) * (input.ndim - at - 1)

        def run(input: Tensor, dim: int, index: Tensor) -> Tensor:
            here, others = owned.find(index)
            out = owned.rows(input, at).index_select(at, here)
            return owned.without(out, others.reshape(-1, *tail))

        return run

    return Factors(
        (letters_of(input), (which,) * index.ndim), (replaced(input, at, which),), {}, {at: "sum"},
        linear_terms=FIRST, local=local,
    )  # fmt: skip


def _gathered(input: Arg, dim: int, index: Arg, broadcast: bool) -> Factors:
    """Returns the factors of gather and take_along_dim (which broadcasts)."""
    at = front(dim, input.ndim)
    rows: list[tuple[Any, ...]] = []  # letters in the input, the index and the result, and size
    for d, (s, n) in enumerate(zip(input.shape, index.shape, strict=True)):
        short, wide = f"short{d}", 0 if 0 in (s, n) else max(s, n)
        if d == at:
            rows.append((d, "index", "index", n))
        elif broadcast:
            rows.append((d if s == wide else None, d if n == wide else short, d, wide))
        else:
            rows.append((d, d, d, n) if s == n else (None, short, short, n))
    mine, theirs, out, shape = zip(*rows, strict=True) if rows else ((),) * 4

    def local(call: Any) -> Callable[..., Tensor]:
        if not call.axes(at):
            return call.func
        owned = Owned.of(call.inputs[0], at)

        def run(input: Tensor, *more: Any, **words: Any) -> Tensor:
            index: Any = next(a for a in more if isinstance(a, Tensor))
            here, others = owned.find(index, negative=broadcast)
            if broadcast:
                out = torch.take_along_dim(owned.rows(input, at), here, at)
            else:
                out = owned.gather(input, at, here, index)
            return owned.without(out, others)

        return run

    shorter = {x for x in theirs if isinstance(x, str) and x != "index"}
    return Factors(
        (mine, theirs), (out,), {}, {at: "sum"}, shorter, linear_terms=FIRST, shapes=(shape,),
        local=local,
    )  # fmt: skip


@rule(*named("gather"), exact=True)
def gather(input: Arg, dim: int, index: Arg, *, sparse_grad: bool = False) -> Factors:
    """elements of a split dim come from their owners: P(sum); the index's dims pass through"""
    if sparse_grad or not input.ndim or input.ndim != index.ndim:
        raise NoRule("gather of a number, or with a sparse gradient")
    return _gathered(input, dim, index, False)


@rule(*named("take_along_dim"), exact=True)
def take_along_dim(input: Arg, indices: Arg, dim: Any = None) -> Factors:
    """as gather, broadcast"""
    if dim is None or input.ndim != indices.ndim:
        raise NoRule("take_along_dim of the flat tensor")
    return _gathered(input, dim, indices, True)


@rule(*named("take"), exact=True)
def take(input: Arg, index: Arg) -> Factors:
    """the input is whole, the index's dims pass through"""
    ins = tuple(f"input{d}" for d in range(input.ndim))
    return Factors((ins, letters_of(index)), (letters_of(index),), linear_terms=FIRST)


# Look-ups of values -------------------------------------------------------------------------------


@rule(torch.isin, torch.bucketize, exact=True)
def look_up(values: Any, others: Any, **words: Any) -> Factors:
    """each value separately, among all of the others, which are whole"""
    if not isinstance(values, Arg):
        raise NoRule("the bucket of a number, or a number among elements")
    dims = letters_of(values)
    return Factors((dims, *((None,) * t.ndim for t in tensors_in(others))), (dims,))


@rule(torch.searchsorted, exact=True)
def searchsorted(sorted_sequence: Arg, input: Any, **words: Any) -> Factors:
    """each value separately, in a whole sequence; rows of values in rows of sequences"""
    if not isinstance(input, Arg) or tensors_in(*words.values()):
        raise NoRule("the place of a number, or places by a sorter")
    if sorted_sequence.ndim == 1:
        dims: Dims = letters_of(input)
        return Factors(((None,), dims), (dims,))
    n = sorted_sequence.ndim - 1
    rows = letters_of(sorted_sequence)[:-1]
    if input.ndim != n + 1 or input.shape[:-1] != sorted_sequence.shape[:-1]:
        raise NoRule("rows that do not fit")
    return Factors(((*rows, None), (*rows, "v")), ((*rows, "v"),))
