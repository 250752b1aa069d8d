"""Joining: cat, stack and related functions. The dim that is joined is whole; the others pass
through.

A piece of a joined dim is not a piece of the parts, so a split there moves to another dim, or is
gathered if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ops.dims import front, letters_of, named
from ops.factors import Arg, Dims, Factors, Letter, NoRule
from ops.registry import rule


def joined(tensors: Sequence[Arg], lifts: Sequence[Dims | None], dim: int) -> Factors:
    """Returns the factors of a cat of tensors seen with other dims.

    ``lifts[i]``: for each dim the dim of tensor i, or None for a new dim of size 1. None in place
    of all: torch skips the tensor.
    """
    pairs = [(t, lift) for t, lift in zip(tensors, lifts, strict=True) if lift is not None]
    if len({len(lift) for _, lift in pairs}) > 1:
        raise NoRule("joining tensors with different numbers of dims")
    shapes = [[1 if d is None else t.shape[d] for d in lift] for t, lift in pairs]
    sides = shapes[0]
    sides[dim] = sum(shape[dim] for shape in shapes)
    # letters are numbered in the lifted dims, so that vectors and matrices meet
    own = [d if origin is not None else None for d, origin in enumerate(pairs[0][1])]
    out: tuple[Letter, ...] = (*own[:dim], "joined", *own[dim + 1 :])
    kinds = {lift for _, lift in pairs}
    lone = {d for d, of in enumerate(zip(*kinds, strict=True)) if len({x is None for x in of}) > 1}
    places = {lift: [lift.index(d) for d in lift if d is not None] for lift in kinds}
    letters = {lift: tuple([None if at == dim else at for at in places[lift]]) for lift in kinds}
    ins = tuple(
        (None,) * t.ndim if lift is None else letters[lift]
        for t, lift in zip(tensors, lifts, strict=True)
    )
    return Factors(
        ins, (out,), dict(enumerate(sides)), unsplittable={"joined", *lone}, moves=True,
        linear_terms=tuple({t.index} for t in tensors), shapes=(tuple(sides),),
    )  # fmt: skip


@rule(*named("cat", "concat", "concatenate"), exact=True)
def cat(tensors: Sequence[Arg], dim: int = 0) -> Factors:
    """the joined dim is whole"""
    # torch skips empty vectors
    solid = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])
    if not solid[0].ndim:
        raise NoRule("cat of numbers")
    lifts = [letters_of(t) if t in solid else None for t in tensors]
    return joined(tensors, lifts, front(dim, solid[0].ndim))


@rule(*named("stack"), exact=True)
def stack(tensors: Sequence[Arg], dim: int = 0) -> Factors:
    """a new dim, whole"""
    at, dims = front(dim, tensors[0].ndim + 1), letters_of(tensors[0])
    return joined(tensors, [(*dims[:at], None, *dims[at:])] * len(tensors), at)


def at_least(t: Arg, ndim: int) -> Dims:
    """Returns the dims of t in ``torch.atleast_{ndim}d(t)``: [n] -> [1, n] -> [1, n, 1]."""
    dims: Dims = letters_of(t) or (None,)
    if len(dims) == 1 and ndim > 1:
        dims = (None, *dims)
    return (*dims, None) if len(dims) == 2 and ndim > 2 else dims


def _stack(names: str, ndim: int, dim: int, doc: str) -> None:
    """Stacks of tensors of at least ``ndim`` dims are a cat along ``dim``."""

    @rule(*named(*names.split()), exact=True, doc=doc)
    def factors(tensors: Sequence[Arg]) -> Factors:
        at = 0 if ndim == 1 and tensors[0].ndim < 2 else dim
        return joined(tensors, [at_least(t, ndim) for t in tensors], at)


_stack("hstack", 1, 1, "cat along the columns (of vectors: along their dim)")
_stack("vstack row_stack", 2, 0, "cat along the rows")
_stack("dstack", 3, 2, "cat along the third dim")


@rule(*named("column_stack"), exact=True)
def column_stack(tensors: Sequence[Arg]) -> Factors:
    """vectors are columns; cat along the columns"""
    return joined(tensors, [(*letters_of(t), *(None,) * (2 - t.ndim)) for t in tensors], 1)
