"""Indexing with brackets: ``x[...]`` and ``x[...] = v``.

A dim that is taken whole (``:``) keeps its split. An indexed dim is gathered: its owner alone could
give a row (as a pending sum, see ops.indexing.gather), but then writing to ``x[0]`` would not write
to x. The dims of index tensors are factors of their own: ids split over the batch give rows split
over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops.dims import ONE, letters_of
from ops.factors import Arg, Factors, Letter
from ops.indexing.getitem import Indexed, read_index
from ops.infer import NoRule
from ops.registry import Rule, register, rule


def _letters_of_indices(got: Indexed) -> list[tuple[Letter, ...]]:
    """Letters of each index tensor of the call."""
    out: list[tuple[Letter, ...]] = []
    for t in got.tensors:
        sizes = got.index.sizes if got.index is not None and t.ndim else {}
        pad = len(sizes) - t.ndim
        out.append(
            tuple(f"index{pad + i}" if s == sizes[pad + i] else None for i, s in enumerate(t.shape))
        )
    return out


def _sizes(input: Arg, got: Indexed) -> dict[Letter, int]:
    sizes: dict[Letter, int] = dict(enumerate(input.shape))
    sizes.update({letter: size for letter, size in got.out if letter is not None})
    return sizes


@rule(torch.Tensor.__getitem__, exact=True)
def getitem(input: Arg, index: Any) -> Factors:
    """full slices keep their split, indexed dims are whole, index tensors may be split"""
    got = read_index(input, index)
    if got.mask is not None:
        raise NoRule("the number of elements that a mask takes depends on the data")
    sizes = _sizes(input, got)
    out = tuple(letter for letter, _ in got.out)
    shape = tuple(size for _, size in got.out)
    plain = not got.tensors
    return Factors(
        (letters_of(input), *_letters_of_indices(got)), (out,), sizes, {},
        frozenset(got.whole), terms=ONE, moves=plain, view=got.index is None, shapes=(shape,),
    )  # fmt: skip


def _value_letters(value: Arg, out: Sequence[tuple[Letter, int]]) -> tuple[Letter, ...]:
    """Letters of a value that is broadcast to the dims ``out``; it may have more dims of size 1."""
    letters: list[Letter] = []
    for i, size in enumerate(value.shape):
        d = len(out) - value.ndim + i
        if d >= 0 and size == out[d][1]:
            letters.append(out[d][0])
        elif size == 1:
            letters.append(None)
        else:
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
                f"indexing result of shape {[s for _, s in out]}"
            )
    return tuple(letters)


def assigned(input: Arg, index: Any, value: Any, **options: Any) -> Factors:
    """Factors of writing ``value`` at ``index``: as getitem, and the value follows the target."""
    got = read_index(input, index)
    dims = letters_of(input)
    if got.mask is not None:
        # the mask lies over the first dims; how much it takes is not known: a value has the others
        n = got.mask.ndim
        if got.mask.dtype != torch.bool or got.mask.shape != input.shape[:n]:
            raise NoRule("a mask of another shape")
        got.out = [(d, input.shape[d]) for d in dims[n:]]
        if isinstance(value, Arg) and any(
            s != 1 for s in value.shape[: max(0, value.ndim - len(got.out))]
        ):
            raise NoRule("how many values a mask takes depends on the data")
        inputs: list[tuple[Letter, ...]] = [dims, dims[:n]]
    else:
        inputs = [dims, *_letters_of_indices(got)]
    sizes = _sizes(input, got)
    if isinstance(value, Arg):
        inputs.append(_value_letters(value, got.out))
    return Factors(tuple(inputs), (dims,), sizes, {}, frozenset(got.whole), **options)


def setitem(input: Arg, index: Any, value: Any) -> Factors:
    """the target keeps its layout; indexed dims are whole; the value follows"""
    return assigned(input, index, value)


register(
    Rule("setitem", setitem, True, pattern=setitem.__doc__ or ""),
    torch.Tensor.__setitem__,
    exact=True,
)


@rule(torch.index_put)
def index_put(input: Arg, indices: Sequence[Any], values: Arg, accumulate: bool = False) -> Factors:
    """indexed dims are whole; the values follow"""
    index = tuple(slice(None) if i is None else i for i in indices)
    terms = (frozenset({0}), frozenset({values.index})) if accumulate else ()
    return assigned(input, index, values, terms=terms)
