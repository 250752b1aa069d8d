"""Tensors in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [v for item in value for v in flat(item)]
    return [value]


def replace_tensors(value: Any, new: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor replaced, in order of appearance."""
    if isinstance(value, Tensor):
        return new(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([replace_tensors(v, new) for v in value])
    if isinstance(value, dict):
        return {k: replace_tensors(v, new) for k, v in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in order of appearance."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []
