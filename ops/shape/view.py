"""Views: dims are split, merged, renamed, added or dropped; nothing is computed.

If torch can view the global tensor, it can also view a piece of it with the same strides, because
only major dims of a merged group are split. A local with other strides (for example, the result of
a collective) is copied with a warning. An error is not possible here: strides may differ between
ranks, and an error on some ranks would make the others hang. In-place writes through such a copy do
not reach the base.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ops.dims import FIRST, front, fronts, letters_of, moved, named, numbers
from ops.factors import Arg, Factors, NoRule
from ops.registry import rule
from ops.shape.regroup import regrouped, resolve
from ops.shape.strides import own_memory

Tensor = torch.Tensor
Local = Callable[..., Any]


def needed(call: Any) -> bool:
    """Returns True if the sizes of the pieces may differ from the sizes in the call."""
    return bool(call.split) or len(call.inputs) > 1


def local_view(call: Any) -> Local:
    """Returns the view with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape

    def view(input: Tensor, *sizes: Any, **words: Any) -> Tensor:
        try:
            return input.view(shape)
        except RuntimeError:
            warnings.warn(
                f"view: a local of strides {input.stride()} cannot be viewed as {list(shape)} and "
                "is copied; writes in place through the result do not reach what it was taken from",
                stacklevel=2,
            )
            return input.reshape(shape)

    return view if call.split else call.func


def local_reshape(call: Any) -> Local:
    """Returns the reshape with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape
    run = (lambda input, *sizes, **words: input.reshape(shape)) if needed(call) else call.func
    return own_memory(call, run)


def local_expand(call: Any) -> Local:
    """Returns the expand with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape
    return (lambda input, *sizes, **words: input.expand(shape)) if needed(call) else call.func


@rule(torch.Tensor.view, exact=True)
def view(input: Arg, *shape: Any) -> Factors:
    """dims are split and merged; a split major dim stays split where the pieces are whole rows"""
    kind = shape[0] if shape else None
    if isinstance(kind, torch.dtype):
        if input.dtype is None or kind.itemsize != input.dtype.itemsize:
            raise NoRule("view as a dtype of another size")
        return moved(input, letters_of(input), moves=False)
    return regrouped(input, numbers(shape), local=local_view)


@rule(*named("reshape"), exact=True)
def reshape(input: Arg, *shape: Any) -> Factors:
    """as view"""
    return regrouped(input, numbers(shape), local=local_reshape)


def shaped_as(other: Arg, f: Factors) -> Factors:
    """Returns ``f`` of a call whose second tensor counts by its shape only."""
    inputs = (*f.inputs, (None,) * other.ndim)
    return f.replace(inputs=inputs, metadata_only={1}, moves=False, linear_terms=FIRST)


@rule(*named("view_as", "reshape_as"), exact=True)
def reshape_as(input: Arg, other: Arg) -> Factors:
    """as view, with the shape of ``other``"""
    return shaped_as(other, regrouped(input, other.shape, local=local_reshape))


@rule(*named("flatten"), exact=True)
def flatten(input: Arg, start_dim: int = 0, end_dim: int = -1) -> Factors:
    """as view"""
    a, b = front(start_dim, input.ndim), front(end_dim, input.ndim)
    shape = input.shape or (1,)
    merged = math.prod(shape[a : b + 1])
    return regrouped(input, (*shape[:a], merged, *shape[b + 1 :]), local=local_reshape)


@rule(*named("ravel"), exact=True)
def ravel(input: Arg) -> Factors:
    """as view(-1)"""
    return regrouped(input, (input.numel(),), local=local_reshape)


@rule(*named("unflatten"), exact=True)
def unflatten(input: Arg, dim: int, sizes: Any) -> Factors:
    """as view"""
    if not isinstance(dim, int):
        raise NoRule("unflatten by name")
    at = front(dim, input.ndim)
    parts = resolve(input.shape[at : at + 1], tuple(sizes))
    return regrouped(
        input, (*input.shape[:at], *parts, *input.shape[at + 1 :]), local=local_reshape
    )


@rule(*named("squeeze"), exact=True)
def squeeze(input: Arg, *dim: Any) -> Factors:
    """dims of global size 1 go; a dim that is 1 on this rank only stays"""
    asked = range(input.ndim) if not dim or dim[0] is None else fronts(numbers(dim), input.ndim)
    gone = tuple(d for d in asked if d < input.ndim and input.shape[d] == 1)
    ins = tuple(None if d in gone else d for d in range(input.ndim))
    out = tuple(d for d in range(input.ndim) if d not in gone)

    def local(call: Any) -> Local:
        return (lambda input, *dim, **words: input.squeeze(gone)) if needed(call) else call.func

    return Factors((ins,), (out,), moves=True, local=local)


@rule(*named("unsqueeze"), exact=True)
def unsqueeze(input: Arg, dim: int) -> Factors:
    """a new dim of size 1"""
    at = front(dim, input.ndim + 1)
    dims = letters_of(input)
    return moved(input, (*dims[:at], None, *dims[at:]))


def expanded(input: Arg, sizes: tuple[int, ...]) -> Factors:
    """Returns the factors of a broadcast to ``sizes`` (-1 keeps a size)."""
    new = len(sizes) - input.ndim
    shape = tuple(input.shape[d - new] if s == -1 and d >= new else s for d, s in enumerate(sizes))
    ins, out = [], []
    for d, s in enumerate(shape):
        kept = d >= new and input.shape[d - new] == s and s != 1
        if d >= new:
            ins.append(d if kept else None)
        out.append(d if kept else None)
    return Factors((tuple(ins),), (tuple(out),), moves=True, shapes=(shape,), local=local_expand)


@rule(*named("expand", "broadcast_to"), exact=True)
def expand(input: Arg, *size: Any, implicit: bool = False) -> Factors:
    """dims of size 1 are repeated without a copy, new dims come in front"""
    return expanded(input, numbers(size))


@rule(*named("expand_as"), exact=True)
def expand_as(input: Arg, other: Arg) -> Factors:
    """as expand, with the shape of ``other``"""
    return shaped_as(other, expanded(input, other.shape))


@rule(torch.Tensor.contiguous, exact=True)
def contiguous(input: Arg, memory_format: Any = torch.contiguous_format) -> Factors:
    """every dim passes through; the result is the argument itself, or a copy"""

    def local(call: Any) -> Local:
        plain = memory_format is torch.contiguous_format
        return own_memory(call, call.func, always=True) if plain else call.func

    letters = letters_of(input)
    return moved(input, letters, local=local, independent=set(letters))


@rule(*named("detach", "alias"), exact=True)
def same(input: Arg, **words: Any) -> Factors:
    """every dim passes through; the result shares the memory"""
    return moved(input, letters_of(input))


@rule(*named("clone", "detach_copy"), exact=True)
def clone(input: Arg, **words: Any) -> Factors:
    """every dim passes through"""
    return moved(input, letters_of(input))
