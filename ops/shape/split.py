"""Cutting: split, chunk, unbind, glu. The dim that is cut is whole; the others pass through.

Gated functions that pair the halves of a dim (chunk, glu) always see whole halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F

from ops.dims import front, letters_of, moved, named, replaced
from ops.factors import Arg, Factors, Letter, NoRule
from ops.registry import rule


def cut(input: Arg, dim: int, sizes: Sequence[int]) -> Factors:
    """Returns the factors of pieces of these sizes along a whole ``dim``."""
    outs = tuple(replaced(input, dim, f"piece{i}") for i in range(len(sizes)))
    known: dict[Letter, int] = {f"piece{i}": s for i, s in enumerate(sizes)}
    known.update(enumerate(input.shape))
    return Factors((letters_of(input),), outs, known, unsplittable={dim}, moves=True)


@rule(*named("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), exact=True)
def split(input: Arg, sizes: Any, dim: int = 0) -> Factors:
    """the dim that is cut is whole"""
    at = front(dim, input.ndim)
    total = input.shape[at]
    if isinstance(sizes, int):
        if sizes <= 0:
            raise NoRule("pieces of size 0")
        count = max(1, -(-total // sizes))
        sizes = [min(sizes, total - i * sizes) for i in range(count)]
    return cut(input, at, sizes)


@rule(*named("chunk", "unsafe_chunk"), exact=True)
def chunk(input: Arg, chunks: int, dim: int = 0) -> Factors:
    """the dim that is cut is whole"""
    at = front(dim, input.ndim)
    step = -(-input.shape[at] // chunks)
    return split(input, step, at) if step else cut(input, at, [0] * chunks)


def _sections(input: Arg, sections: Any, at: int) -> Factors:
    """Returns the factors of tensor_split, from a number of nearly equal pieces or the places of
    the cuts."""
    total = input.shape[at]
    if isinstance(sections, int):
        small, more = divmod(total, sections)
        return cut(input, at, [small + (i < more) for i in range(sections)])
    if isinstance(sections, Arg):
        raise NoRule("cuts given by a tensor")
    places = [0, *(min(max(s + total if s < 0 else s, 0), total) for s in sections), total]
    return cut(input, at, [max(0, b - a) for a, b in pairwise(places)])


@rule(*named("tensor_split"), exact=True)
def tensor_split(input: Arg, sections: Any, dim: int = 0) -> Factors:
    """the dim that is cut is whole"""
    return _sections(input, sections, front(dim, input.ndim))


def _split_at(name: str, at: int) -> None:
    @rule(*named(name), exact=True, doc="the dim that is cut is whole")
    def factors(input: Arg, *sections: Any) -> Factors:
        dim = 0 if name == "hsplit" and input.ndim == 1 else at
        return _sections(input, sections[0] if len(sections) == 1 else sections, dim)


_split_at("vsplit", 0)
_split_at("hsplit", 1)
_split_at("dsplit", 2)


@rule(*named("unbind"), exact=True)
def unbind(input: Arg, dim: int = 0) -> Factors:
    """the dim that goes is whole"""
    at = front(dim, input.ndim)
    outs = (replaced(input, at),) * input.shape[at]
    sizes: dict[Letter, int] = dict(enumerate(input.shape))
    return Factors((letters_of(input),), outs, sizes, {}, {at}, moves=True)


@rule(F.glu)
def glu(input: Arg, dim: int = -1) -> Factors:
    """the dim whose halves are paired is whole"""
    at = front(dim, input.ndim)
    halves: dict[Letter, int] = {"half": input.shape[at] // 2}
    return moved(input, replaced(input, at, "half"), halves, moves=False)
