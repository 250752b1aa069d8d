"""Joining and cutting: the dim that is joined, cut or repeated is whole; the others pass through.

A piece of a joined dim is no piece of the parts, so a split there is gathered first: gated functions that pair
the halves of a dim (chunk, glu) always see whole halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import front, letters_of, moved, named, numbers
from ops.factors import Arg, Dims, Factors, Letter
from ops.infer import NoRule
from ops.registry import rule

Lifted = tuple[Dims, tuple[int, ...]]


def joined(
    tensors: Sequence[Arg], letters: Sequence[Dims], lifted: Sequence[Lifted], dim: int
) -> Factors:
    """Factors of a cat of tensors seen with other dims (``lifted``: letters and sizes of each)."""
    sizes: dict[Letter, int] = {}
    total = 0
    for dims, shape in lifted:
        total += shape[dim]
        for d, (letter, s) in enumerate(zip(dims, shape, strict=True)):
            if letter is not None and d != dim:
                if sizes.setdefault(letter, s) != s:
                    raise RuntimeError(
                        f"Sizes of tensors must match except in dimension {dim}: {sizes[letter]} and "
                        f"{s} in dimension {d}"
                    )
    lone = {dims[d] for d in range(len(lifted[0][1])) for dims, _ in lifted if not all(x[d] == dims[d] for x, _ in lifted)}
    out = list(lifted[0][0])
    out[dim] = "joined"
    sizes["joined"] = total
    ins = tuple(tuple(None if letter == dim else letter for letter in dims) for dims in letters)
    shape = list(lifted[0][1])
    shape[dim] = total
    terms = tuple(frozenset({t.index}) for t in tensors)
    return Factors(
        ins, (tuple(out),), sizes, whole=frozenset({"joined", *lone}), moves=True, terms=terms,
        shapes=(tuple(shape),),
    )  # fmt: skip


@rule(*named("cat", "concat", "concatenate"), exact=True)
def cat(tensors: Sequence[Arg], dim: int = 0) -> Factors:
    """the joined dim is whole"""
    solid = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])  # torch skips empty vectors
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
        raise RuntimeError(f"stack expects tensors of equal size: {[list(t.shape) for t in tensors]}")
    at = front(dim, ndim + 1)
    dims = letters_of(tensors[0])
    out = (*dims[:at], "stack", *dims[at:])
    sizes: dict[Letter, int] = {**dict(enumerate(tensors[0].shape)), "stack": len(tensors)}
    terms = tuple(frozenset({t.index}) for t in tensors)
    return Factors((dims,) * len(tensors), (out,), sizes, moves=True, terms=terms)


def _at_least(t: Arg, ndim: int) -> Lifted:
    """Letters and sizes of ``torch.atleast_{ndim}d(t)``: [n] -> [1, n] -> [1, n, 1]."""
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


@rule(*named("hstack"), exact=True)
def hstack(tensors: Sequence[Arg]) -> Factors:
    """cat along the columns (of vectors: along their dim)"""
    return _stacked(tensors, [_at_least(t, 1) for t in tensors], 0 if tensors[0].ndim < 2 else 1)


@rule(*named("vstack", "row_stack"), exact=True)
def vstack(tensors: Sequence[Arg]) -> Factors:
    """cat along the rows"""
    return _stacked(tensors, [_at_least(t, 2) for t in tensors], 0)


@rule(*named("dstack"), exact=True)
def dstack(tensors: Sequence[Arg]) -> Factors:
    """cat along the third dim"""
    return _stacked(tensors, [_at_least(t, 3) for t in tensors], 2)


@rule(*named("column_stack"), exact=True)
def column_stack(tensors: Sequence[Arg]) -> Factors:
    """vectors are columns; cat along the columns"""
    lifted = [
        ((*letters_of(t), *(None,) * (2 - t.ndim)), (*t.shape, *(1,) * (2 - t.ndim)))
        if t.ndim < 2
        else _at_least(t, 2)
        for t in tensors
    ]
    return _stacked(tensors, lifted, 1)


# Cutting ------------------------------------------------------------------------------------------


def cut(input: Arg, dim: int, sizes: Sequence[int]) -> Factors:
    """Factors of pieces of these sizes along a whole ``dim``."""
    dims = letters_of(input)
    outs = tuple((*dims[:dim], f"piece{i}", *dims[dim + 1 :]) for i in range(len(sizes)))
    known: dict[Letter, int] = dict(enumerate(input.shape))
    known.update({f"piece{i}": s for i, s in enumerate(sizes)})
    return Factors((dims,), outs, known, whole=frozenset({dim}), moves=True, view=True)


@rule(*named("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), exact=True)
def split(tensor: Any = None, split_size_or_sections: Any = None, dim: int = 0, **words: Any) -> Factors:
    """the dim that is cut is whole"""
    input = tensor if tensor is not None else words["input"]
    sizes = split_size_or_sections
    for word in ("split_size", "split_sizes"):
        sizes = words.get(word, sizes)
    at = front(dim, input.ndim)
    total = input.shape[at]
    if isinstance(sizes, int):
        if sizes <= 0:
            raise NoRule("pieces of size 0")
        count = max(1, -(-total // sizes))
        sizes = [min(sizes, total - i * sizes) for i in range(count)]
    if sum(sizes) != total:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {total} (input tensor's size at "
            f"dimension {at}), but got split_sizes={list(sizes)}"
        )
    return cut(input, at, sizes)


@rule(*named("chunk", "unsafe_chunk"), exact=True)
def chunk(input: Arg, chunks: int, dim: int = 0) -> Factors:
    """the dim that is cut is whole"""
    at = front(dim, input.ndim)
    total = input.shape[at]
    step = -(-total // chunks)
    count = -(-total // step) if step else chunks
    return cut(input, at, [min(step, total - i * step) for i in range(count)])


def _sections(input: Arg, sections: Any, at: int) -> Factors:
    """As tensor_split: a number of nearly equal pieces, or the places of the cuts."""
    total = input.shape[at]
    if isinstance(sections, int):
        small, more = divmod(total, sections)
        return cut(input, at, [small + (i < more) for i in range(sections)])
    if isinstance(sections, Arg):
        raise NoRule("cuts given by a tensor")
    places = [0, *(min(max(s + total if s < 0 else s, 0), total) for s in sections), total]
    return cut(input, at, [max(0, b - a) for a, b in zip(places, places[1:], strict=False)])


def _asked(more: tuple[Any, ...], words: dict[str, Any]) -> Any:
    for word in ("indices_or_sections", "sections", "indices"):
        if word in words:
            return words[word]
    return more[0] if len(more) == 1 else tuple(more)


@rule(*named("tensor_split"), exact=True)
def tensor_split(input: Arg, *more: Any, dim: int = 0, **words: Any) -> Factors:
    """the dim that is cut is whole"""
    if len(more) > 1:
        more, dim = more[:1], more[1]
    return _sections(input, _asked(more, words), front(dim, input.ndim))


@rule(*named("hsplit"), exact=True)
def hsplit(input: Arg, *more: Any, **words: Any) -> Factors:
    """the dim that is cut is whole"""
    return _sections(input, _asked(more, words), 0 if input.ndim == 1 else 1)


@rule(*named("vsplit"), exact=True)
def vsplit(input: Arg, *more: Any, **words: Any) -> Factors:
    """the dim that is cut is whole"""
    return _sections(input, _asked(more, words), 0)


@rule(*named("dsplit"), exact=True)
def dsplit(input: Arg, *more: Any, **words: Any) -> Factors:
    """the dim that is cut is whole"""
    return _sections(input, _asked(more, words), 2)


@rule(*named("unbind"), exact=True)
def unbind(input: Arg, dim: int = 0) -> Factors:
    """the dim that goes is whole"""
    at = front(dim, input.ndim)
    dims = letters_of(input)
    outs = ((*dims[:at], *dims[at + 1 :]),) * input.shape[at]
    sizes: dict[Letter, int] = dict(enumerate(input.shape))
    return Factors((dims,), outs, sizes, whole=frozenset({at}), moves=True, view=True)


# Repeating ----------------------------------------------------------------------------------------


def _repeated(input: Arg, times: tuple[int, ...]) -> Factors:
    new = len(times) - input.ndim
    if new < 0:
        raise RuntimeError(
            f"Number of dimensions of repeat dims {list(times)} can not be smaller than number of "
            f"dimensions of tensor {list(input.shape)}"
        )
    out: list[Letter] = [f"times{i}" for i in range(new)]
    sizes: dict[Letter, int] = {f"times{i}": times[i] for i in range(new)}
    for d, n in enumerate(times[new:]):
        out.append(d if n == 1 else f"long{d}")
        sizes[f"long{d}"] = n * input.shape[d]
    return moved(input, tuple(out), sizes)


@rule(*named("repeat"), exact=True)
def repeat(input: Arg, *repeats: Any, **words: Any) -> Factors:
    """repeated dims are whole"""
    return _repeated(input, numbers(repeats, words.get("repeats")))


@rule(*named("tile"), exact=True)
def tile(input: Arg, *dims: Any, **words: Any) -> Factors:
    """repeated dims are whole"""
    times = numbers(dims, words.get("dims"))
    return _repeated(input, (1,) * (input.ndim - len(times)) + times)


@rule(*named("repeat_interleave"), exact=True)
def repeat_interleave(
    input: Arg, repeats: Any, dim: Any = None, *, output_size: Any = None
) -> Factors:
    """the dim may stay split evenly: each piece is repeated where it is"""
    if not isinstance(repeats, int):
        raise NoRule("numbers of repeats given by a tensor")
    if dim is None:
        return moved(input, ("long",), {"long": input.numel() * repeats})
    at = front(dim, input.ndim)
    if not input.ndim:
        return moved(input, ("long",), {"long": repeats})
    if output_size is not None or repeats == 0:
        raise NoRule("output_size")
    dims: tuple[Letter, ...] = letters_of(input)
    out = (*dims[:at], (at, "repeats"), *dims[at + 1 :])
    return moved(input, out, {"repeats": repeats}, even=frozenset({at}))


@rule(F.glu)
def glu(input: Arg, dim: int = -1) -> Factors:
    """the dim whose halves are paired is whole"""
    at = front(dim, input.ndim)
    dims: tuple[Letter, ...] = letters_of(input)
    if input.shape[at] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {at} is size {input.shape[at]}")
    return moved(
        input, (*dims[:at], "half", *dims[at + 1 :]), {"half": input.shape[at] // 2}, moves=False
    )


@rule(F.pad)
def pad(
    input: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Factors:
    """padded dims are whole"""
    out: list[Letter] = list(letters_of(input))
    sizes: dict[Letter, int] = {}
    if mode != "constant":  # the other modes take at most a batch and a channel dim in front
        raise NoRule(f"padding by {mode}")
    for i in range(len(pad) // 2):
        d = input.ndim - 1 - i
        if pad[2 * i] or pad[2 * i + 1]:
            out[d] = f"padded{d}"
            sizes[f"padded{d}"] = input.shape[d] + pad[2 * i] + pad[2 * i + 1]
    zero = value is None or (isinstance(value, int) and value == 0)  # (a float counts by type)
    return moved(input, tuple(out), sizes, moves=zero)  # zeros stay zeros in any reduction


@rule(torch.meshgrid)
def meshgrid(*tensors: Any, indexing: Any = None) -> Factors:
    """each vector is a dim of every result"""
    given: Sequence[Arg] = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    order: list[int] = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        order[:2] = order[1], order[0]
    sizes: dict[Letter, int] = {i: t.numel() for i, t in enumerate(given)}
    ins = tuple((i,) if t.ndim else () for i, t in enumerate(given))
    outs = (tuple(order),) * len(given)
    return Factors(ins, outs, sizes, moves=True)
