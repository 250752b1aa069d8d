"""Walking the arguments and results of a call: tensors in lists, tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor
Path = tuple[Any, ...]  # the keys and numbers that lead to a part of a structure


def flat(value: Any, out: list[Any], kind: type = Tensor) -> list[Any]:
    """Appends the values of class ``kind`` to ``out``, in order of appearance, and returns it."""
    if isinstance(value, kind):
        out.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            if isinstance(v, kind):  # in a list of many no call for each
                out.append(v)
            elif isinstance(v, (list, tuple, dict)):
                flat(v, out, kind)
    elif isinstance(value, dict):
        flat([*value.values()], out, kind)
    return out


def substitute(value: Any, f: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Returns the same structure with f(v) for each v of class ``kind``."""
    if isinstance(value, kind):
        return f(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, [substitute(v, f, kind) for v in value])
    if isinstance(value, dict):
        return refilled(value, {k: substitute(v, f, kind) for k, v in value.items()})
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
    """Returns a list or tuple of the class of ``like`` with these items; a torch.Size as a tuple.

    Classes of users are not called: a named tuple or a list may be made of other arguments.
    """
    kind = type(like)
    if kind is list:
        return items
    if kind is tuple or kind is torch.Size:
        return tuple(items)
    if isinstance(like, list):
        other = copy.copy(like)
        other[:] = items
        return other
    if kind.__module__ == "torch.return_types":
        return kind(items)
    return tuple.__new__(kind, items)
