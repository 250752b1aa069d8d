"""Small words that the rules of shapes share: functions by name, dims from the front, letters."""

from __future__ import annotations

from typing import Any

import torch

from ops.factors import Arg, Dims, Factors, Letter
from ops.registry import Function

ONE = (frozenset({0}),)  # terms of a function that is linear in its first tensor


def named(*names: str, places: tuple[Any, ...] = (torch, torch.Tensor)) -> list[Function]:
    """The functions of these names in torch and of Tensor, without their in-place forms."""
    found = [getattr(place, name, None) for name in names for place in places]
    return list(dict.fromkeys(f for f in found if f is not None))


def front(dim: int, ndim: int) -> int:
    """``dim`` counted from the front. Raises IndexError, as torch does."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(ndim, 1)}, "
            f"{max(ndim, 1) - 1}], but got {dim})"
        )
    return dim % max(ndim, 1)


def fronts(dims: Any, ndim: int) -> tuple[int, ...]:
    """One dim or several, counted from the front."""
    return tuple(front(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims))


def numbers(args: tuple[Any, ...], word: Any = None) -> tuple[int, ...]:
    """Sizes or dims given one by one, as one sequence, or by keyword."""
    if word is not None:
        args = (word,)
    if len(args) == 1 and not isinstance(args[0], int):
        args = tuple(args[0])
    return tuple(int(a) for a in args)


def letters_of(input: Arg) -> tuple[int, ...]:
    """A letter for each dim: its number."""
    return tuple(range(len(input.shape)))


def moved(input: Arg, out: Dims, sizes: dict[Letter, int] | None = None, **options: Any) -> Factors:
    """Factors of a pure movement of elements, of letters 0, 1, ...: any Partial passes."""
    known: dict[Letter, int] = dict(enumerate(input.shape))
    known.update(sizes or {})
    options.setdefault("moves", True)
    return Factors((letters_of(input),), (out,), known, **options)


def tensors_in(*values: Any) -> list[Arg]:
    """The tensors among the values, in order."""
    return [v for v in values if isinstance(v, Arg)]
