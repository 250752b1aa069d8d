"""Joining: cat, stack and related functions. The dim that is joined is whole; the others pass
through.

A piece of a joined dim is not a piece of the parts, so a split there moves to another dim, or is
gathered if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ops.dims import front, letters_of, named
from ops.factors import Arg, Dims, Factors, Letter
from ops.infer import NoRule
from ops.registry import rule

Lifted = tuple[Dims, tuple[int, ...]]


def joined(
    tensors: Sequence[Arg], letters: Sequence[Dims], lifted: Sequence[Lifted], dim: int
) -> Factors:
    """Returns the factors of a cat of tensors seen with other dims (``lifted``: letters and sizes
    of each)."""
    sizes: dict[Letter, int] = {}
    total = 0
    for dims, shape in lifted:
        total += shape[dim]
        for d, (letter, s) in enumerate(zip(dims, shape, strict=True)):
            if letter is not None and d != dim and sizes.setdefault(letter, s) != s:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {dim}: {sizes[letter]} and "
                    f"{s} in dimension {d}"
                )
    lone = {
        dims[d]
        for d in range(len(lifted[0][1]))
        for dims, _ in lifted
        if not all(x[d] == dims[d] for x, _ in lifted)
    }
    out = list(lifted[0][0])
    out[dim] = "joined"
    sizes["joined"] = total
    ins = tuple(tuple(None if letter == dim else letter for letter in dims) for dims in letters)
    sides = lifted[0][1]
    terms = tuple({t.index} for t in tensors)
    return Factors(
        ins, (tuple(out),), sizes, unsplittable={"joined", *lone}, moves=True, linear_terms=terms,
        shapes=((*sides[:dim], total, *sides[dim + 1 :]),),
    )  # fmt: skip


@rule(*named("cat", "concat", "concatenate"), exact=True)
def cat(tensors: Sequence[Arg], dim: int = 0) -> Factors:
    """the joined dim is whole"""
    # torch skips empty vectors
    solid = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])
    if len({t.ndim for t in solid}) > 1 or not solid[0].ndim:
        raise NoRule("cat of tensors with different numbers of dims")
    at = front(dim, solid[0].ndim)
    letters = [letters_of(t) if t in solid else (None,) for t in tensors]
    return joined(tensors, letters, [(letters_of(t), t.shape) for t in solid], at)


@rule(*named("stack"), exact=True)
def stack(tensors: Sequence[Arg], dim: int = 0) -> Factors:
    """a new dim, whole"""
    ndim = tensors[0].ndim
    if any(t.shape != tensors[0].shape for t in tensors):
        raise RuntimeError(
            f"stack expects tensors of equal size: {[list(t.shape) for t in tensors]}"
        )
    at = front(dim, ndim + 1)
    dims = letters_of(tensors[0])
    out = (*dims[:at], "stack", *dims[at:])
    sizes: dict[Letter, int] = {**dict(enumerate(tensors[0].shape)), "stack": len(tensors)}
    terms = tuple({t.index} for t in tensors)
    return Factors((dims,) * len(tensors), (out,), sizes, moves=True, linear_terms=terms)


def at_least(t: Arg, ndim: int) -> Lifted:
    """Returns the letters and sizes of ``torch.atleast_{ndim}d(t)``: [n] -> [1, n] -> [1, n, 1]."""
    dims: tuple[Letter, ...] = letters_of(t)
    shape = t.shape
    if not shape:
        return (None,) * ndim, (1,) * ndim
    if len(shape) == 1 and ndim > 1:
        dims, shape = (None, *dims), (1, *shape)
    if len(shape) == 2 and ndim > 2:
        dims, shape = (*dims, None), (*shape, 1)
    return dims, shape


def _stacked(tensors: Sequence[Arg], lifted: list[Lifted], dim: int) -> Factors:
    if len({len(shape) for _, shape in lifted}) > 1:
        raise NoRule("stacking tensors with different numbers of dims")
    # letters are numbered in the lifted dims, so that vectors and matrices meet
    places = [{letter: d for d, letter in enumerate(dims)} for dims, _ in lifted]
    letters = [
        tuple(place[d] for d in range(t.ndim)) for t, place in zip(tensors, places, strict=True)
    ]
    numbered = [
        (tuple(None if x is None else d for d, x in enumerate(dims)), shape)
        for dims, shape in lifted
    ]
    return joined(tensors, letters, numbered, dim)


def _stack(names: str, ndim: int, dim: int, doc: str) -> None:
    """Stacks of tensors of at least ``ndim`` dims are a cat along ``dim``."""

    @rule(*named(*names.split()), exact=True, doc=doc)
    def factors(tensors: Sequence[Arg]) -> Factors:
        at = 0 if ndim == 1 and tensors[0].ndim < 2 else dim
        return _stacked(tensors, [at_least(t, ndim) for t in tensors], at)


_stack("hstack", 1, 1, "cat along the columns (of vectors: along their dim)")
_stack("vstack row_stack", 2, 0, "cat along the rows")
_stack("dstack", 3, 2, "cat along the third dim")


@rule(*named("column_stack"), exact=True)
def column_stack(tensors: Sequence[Arg]) -> Factors:
    """vectors are columns; cat along the columns"""
    lifted = [
        ((*letters_of(t), *(None,) * (2 - t.ndim)), (*t.shape, *(1,) * (2 - t.ndim)))
        if t.ndim < 2
        else at_least(t, 2)
        for t in tensors
    ]
    return _stacked(tensors, lifted, 1)
