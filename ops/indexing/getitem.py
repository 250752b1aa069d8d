"""Indexing with brackets: ``x[...]`` and ``x[...] = v``.

A dim that is taken whole (``:``) keeps its split. An indexed dim is gathered. A pending sum of the
owner's row (see ops.indexing.gather) would send less, but a write to ``x[0]`` would then not write
to x. The dims of index tensors are letters of their own: ids split over the batch give rows split
over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ops.dims import FIRST, letters_of
from ops.factors import Arg, Factors, Letter, NoRule, pointwise_factors
from ops.registry import rule

INTS = (torch.int64, torch.int32, torch.int16, torch.int8, None)


@dataclass(slots=True)
class Indexed:
    """The dims of an indexed tensor and of its result.

    out      (letter, size) of each dim of the result: of the input, of an index, or whole.
    whole    letters of the input that are indexed.
    tensors  the index tensors, in order, with their letters.
    mask     the index is one bool tensor over the first dims.
    """

    out: list[tuple[Letter, int]] = field(default_factory=list)
    whole: set[Letter] = field(default_factory=set)
    tensors: list[Arg] = field(default_factory=list)
    index: Factors | None = None
    mask: Arg | None = None


def entries(input: Arg, index: Any) -> list[Any]:
    """Returns the index as a list with an entry for each dim (None: a new dim), no Ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        if isinstance(item, bool) or not (
            item is None or item is Ellipsis or isinstance(item, (int, slice, Arg, list, range))
        ):
            raise NoRule(f"indexing with {type(item).__name__}")
        if isinstance(item, (list, range)) and not all(type(i) is int for i in item):
            raise NoRule("indexing with a nested list")
    used = sum(i is not None and i is not Ellipsis for i in items)
    if used > input.ndim:
        raise IndexError(f"too many indices for tensor of dimension {input.ndim}")
    full = [slice(None)] * (input.ndim - used)
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    at = dots[0] if dots else len(items)
    if len(dots) > 1:
        raise NoRule("more than one Ellipsis")
    return [*items[:at], *full, *items[at + 1 :]]


def read_index(input: Arg, index: Any) -> Indexed:
    """Returns the dims of ``input[index]``. Raises NoRule if they depend on data."""
    got = Indexed()
    single = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(single, Arg) and single.dtype in (torch.bool, torch.uint8):
        got.mask = single
        return got
    dim = 0
    advanced: list[Arg] = []
    places: list[int] = []  # where in the result an index tensor stands; torch puts them together
    for item in entries(input, index):
        if item is None:
            got.out.append((None, 1))
            continue
        size = input.shape[dim]
        if isinstance(item, int):
            got.whole.add(dim)
        elif isinstance(item, slice):
            start, stop, step = item.indices(size) if _plain(item) else (0, -1, 0)
            if step <= 0:
                raise NoRule("a slice of tensors, or backwards")
            full = (start, stop, step) == (0, size, 1)
            if not full:
                got.whole.add(dim)
            got.out.append((dim if full else f"slice{dim}", len(range(start, stop, step))))
        elif isinstance(item, Arg) and not item.ndim and item.dtype in INTS:  # as a number
            got.whole.add(dim)
            got.tensors.append(item)
        else:
            got.whole.add(dim)
            places.append(len(got.out))
            got.out.append(("advanced", 0))
            if isinstance(item, Arg):
                if item.dtype not in INTS:
                    raise NoRule("a mask among the indices")
                got.tensors.append(item)
                advanced.append(item)
            else:
                advanced.append(Arg((len(item),)))
        dim += 1
    if advanced:
        _place(got, advanced, places)
    return got


def _plain(item: slice) -> bool:
    return all(v is None or isinstance(v, int) for v in (item.start, item.stop, item.step))


def _place(got: Indexed, advanced: Sequence[Arg], places: Sequence[int]) -> None:
    """Puts the broadcast dims of the indices where torch puts them: at the place of the indices if
    these are neighbours, else first."""
    got.index = pointwise_factors(advanced)
    fixed = {
        d for a, dims in zip(advanced, got.index.inputs, strict=True) if a.index < 0 for d in dims
    }
    dims: list[tuple[Letter, int]] = []
    for d in got.index.outputs[0]:
        dims.append((f"index{d}", got.index.sizes[d]))
        if d in fixed:
            got.whole.add(f"index{d}")
    rest = [o for o in got.out if o[0] != "advanced"]
    together = list(places) == list(range(places[0], places[0] + len(places)))
    at = places[0] if together else 0
    got.out = [*rest[:at], *dims, *rest[at:]]


# The rules ----------------------------------------------------------------------------------------


def _letters_of_indices(got: Indexed) -> list[tuple[Letter, ...]]:
    """Returns the letters of each index tensor of the call."""
    out: list[tuple[Letter, ...]] = []
    for t in got.tensors:
        sizes = got.index.sizes if got.index is not None and t.ndim else {}
        pad = len(sizes) - t.ndim
        out.append(
            tuple(f"index{pad + i}" if s == sizes[pad + i] else None for i, s in enumerate(t.shape))
        )
    return out


@rule(torch.Tensor.__getitem__, exact=True)
def getitem(input: Arg, index: Any) -> Factors:
    """full slices keep their split, indexed dims are whole, index tensors may be split"""
    got = read_index(input, index)
    if got.mask is not None:
        raise NoRule("the number of elements that a mask takes depends on the data")
    out = tuple(letter for letter, _ in got.out)
    shape = tuple(size for _, size in got.out)
    plain = not got.tensors
    return Factors(
        (letters_of(input), *_letters_of_indices(got)), (out,),
        {**dict(enumerate(input.shape)), **dict(got.out)}, {},
        set(got.whole), linear_terms=FIRST, moves=plain, shapes=(shape,),
    )  # fmt: skip


def _value_letters(value: Arg, out: Sequence[tuple[Letter, int]]) -> tuple[Letter, ...]:
    """Returns the letters of a value that is broadcast to ``out``, and may have dims of size 1."""
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
    """Returns the factors of writing ``value`` at ``index``; the value follows the target."""
    got = read_index(input, index)
    dims = letters_of(input)
    if got.mask is not None:
        # the mask covers the first dims, and the number of selected elements is unknown: a value
        # has the other dims
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
    if isinstance(value, Arg):
        inputs.append(_value_letters(value, got.out))
    return Factors(tuple(inputs), (dims,), unsplittable=set(got.whole), **options)


@rule(torch.Tensor.__setitem__, exact=True)
def setitem(input: Arg, index: Any, value: Any) -> Factors:
    """the target keeps its layout; indexed dims are whole; the value follows"""
    return assigned(input, index, value)


@rule(torch.index_put)
def index_put(input: Arg, indices: Sequence[Any], values: Arg, accumulate: bool = False) -> Factors:
    """indexed dims are whole; the values follow"""
    index = tuple(slice(None) if i is None else i for i in indices)
    terms = ({0}, {values.index}) if accumulate else ()
    return assigned(input, index, values, linear_terms=terms)
