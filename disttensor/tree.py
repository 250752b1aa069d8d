"""Walking the arguments and results of a call: tensors in lists, tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor
Path = tuple[Any, ...]  # the keys and numbers that lead to a part of a structure


def flat(value: Any, out: list[Tensor]) -> list[Tensor]:
    """Tensors in order of appearance, appended to ``out``."""
    if isinstance(value, Tensor):
        out.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            if isinstance(v, Tensor):  # in a list of many no call for each
                out.append(v)
            elif isinstance(v, (list, tuple, dict)):
                flat(v, out)
    elif isinstance(value, dict):
        flat([*value.values()], out)
    return out


def substitute(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """The same structure with f(t) for each tensor t."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [substitute(v, f) for v in value])
    if isinstance(value, dict):
        return refilled(value, {k: substitute(v, f) for k, v in value.items()})
    return value


def map_leaves(value: Any, kind: type, f: Callable[[Any], Any]) -> Any:
    """The same structure with f(v) for each v of class ``kind``: fills in a result with holes."""
    if type(value) is kind:
        return f(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, [map_leaves(v, kind, f) for v in value])
    if type(value) is dict:
        return {k: map_leaves(v, kind, f) for k, v in value.items()}
    return value


def map_paths(value: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """The same structure, its mappings as dicts, with ``leaf(x, path)`` for each x that is no
    container."""
    if isinstance(value, Mapping):
        return {k: map_paths(v, leaf, (*path, k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [map_paths(v, leaf, (*path, i)) for i, v in enumerate(value)])
    return leaf(value, path)


def refilled(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the class of ``like``, with these items in the place of its own."""
    if type(like) is dict:
        return items
    other = copy.copy(like)
    for k, v in items.items():
        other[k] = v
    return other


def rebuilt(like: Any, items: list[Any]) -> Any:
    """A list, tuple, torch.Size (as a tuple), named tuple or torch.return_types as ``like``, with
    these items."""
    kind = type(like)
    if kind is list:
        return items
    if kind is tuple or kind is torch.Size:
        return tuple(items)
    return (
        kind(items)
        if kind.__module__ == "torch.return_types" or not hasattr(like, "_fields")
        else kind(*items)
    )
