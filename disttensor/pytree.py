"""Walks nested arguments and results: tensors in lists, tuples, dicts, dataclasses and objects.

Arguments of torch's functions nest lists, tuples and dicts only (``collect``, ``substitute``), and
a module makes many such calls. Inputs and outputs of modules nest dataclasses too, and outputs hold
tensors in attributes of other objects (``find_tensors``, ``replace_tensors``).
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
CONSTANTS = frozenset({
    int, str, bool, float, complex, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
})  # fmt: skip
DICTS = Counter, OrderedDict, defaultdict
Path = tuple[Any, ...]  # the keys and numbers that lead to a part of a structure


def collect(value: Any, out: list[Any], kind: type = Tensor) -> list[Any]:
    """Appends the values of class ``kind`` to ``out``, in order of appearance, and returns it."""
    if isinstance(value, kind):
        out.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            if isinstance(v, kind):  # a long list needs no call for each entry
                out.append(v)
            elif isinstance(v, (list, tuple, dict)):
                collect(v, out, kind)
    elif isinstance(value, dict):
        collect([*value.values()], out, kind)
    return out


def substitute(value: Any, f: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Returns the same structure with f(v) for each v of class ``kind``."""
    if isinstance(value, kind):
        return f(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuild(value, [substitute(v, f, kind) for v in value])
    if isinstance(value, dict):
        return refill(value, {k: substitute(v, f, kind) for k, v in value.items()})
    return value


class Uncacheable(Exception):
    """Raised for an argument that cannot be part of a key; the message names its class."""


def key_of_contents(value: Any, key_of_tensor: Callable[[Any], Any], tensor: Any = Tensor) -> Any:
    """Returns a key of constants by class and value, containers by their contents, and values of
    class ``tensor`` by ``key_of_tensor``. Raises Uncacheable for other objects."""
    kind = type(value)
    if isinstance(value, tensor):
        return key_of_tensor(value)
    if kind in CONSTANTS:  # 0.0 and -0.0 are equal, and two constants
        return kind, value, repr(value) if kind is float or kind is complex else ""
    if kind is list or kind is tuple:
        return kind, tuple([key_of_contents(v, key_of_tensor, tensor) for v in value])
    if kind is dict:
        return kind, key_of_contents([*value.items()], key_of_tensor, tensor)
    if kind is slice:
        return kind, key_of_contents((value.start, value.stop, value.step), key_of_tensor, tensor)
    raise Uncacheable(f"an argument is a {kind.__name__}")


def map_paths(
    value: Any, leaf: Callable[[Any, Path], Any], path: Path = (), dicts: Sequence[type] = DICTS
) -> Any:
    """Returns the same structure with ``leaf(x, path)`` for each x that is not a container. A
    mapping becomes a dict, unless its class is in ``dicts`` and another process can have it."""
    if isinstance(value, Mapping):
        items = {k: map_paths(v, leaf, (*path, k), dicts) for k, v in value.items()}
        factory = getattr(value, "default_factory", None)
        is_known = getattr(factory, "__module__", "builtins") == "builtins"
        return refill(value, items) if is_known and type(value) in dicts else items
    if isinstance(value, (list, tuple)):
        return rebuild(value, [map_paths(v, leaf, (*path, i), dicts) for i, v in enumerate(value)])
    return leaf(value, path)


def refill(like: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a dict of the class of ``like`` with these items."""
    if type(like) is dict:
        return items
    other = copy.copy(like)
    for k, v in items.items():
        other[k] = v
    return other


def rebuild(like: Any, items: list[Any]) -> Any:
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


# Modules: inputs and outputs -----------------------------------------------------------------

_SEQUENCE, _DICT, _DATACLASS, _OBJECT, _OTHER = range(5)
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)


def find_tensors(value: Any, attributes: bool = False) -> list[Tensor]:
    """Returns the tensors in a value, in order of appearance. ``attributes``: also tensors in
    attributes of objects that are not dataclasses, as a distribution. Do not use it for arguments
    of a module: a module reads only its part of a cache for all layers."""
    out: list[Tensor] = []
    _collect((value,), attributes, out, set())
    return out


def _collect(parts: Iterable[Any], attributes: bool, out: list[Tensor], seen: set[int]) -> None:
    for value in parts:
        if isinstance(value, Tensor):
            out.append(value)
            continue
        kind = _kind(type(value))
        if kind == _SEQUENCE:
            _collect(value, attributes, out, seen)
        elif kind == _DICT:
            _collect(value.values(), attributes, out, seen)
        elif kind != _OTHER and id(value) not in seen:  # an object may refer to itself
            if kind == _DATACLASS:
                seen.add(id(value))
                _collect(_of_fields(value).values(), attributes, out, seen)
            elif attributes:
                seen.add(id(value))
                _collect(vars(value).values(), attributes, out, seen)


def has_attributes(value: Any) -> bool:
    """Returns True for a dataclass and for another object that may hold tensors in attributes."""
    return _kind(type(value)) in (_DATACLASS, _OBJECT) and hasattr(value, "__dict__")


def replace_tensors(value: Any, f: Callable[[Tensor], Any], attributes: bool = False) -> Any:
    """Returns the value with f(t) for each tensor t. A dataclass is copied if one of its tensors
    changes; with ``attributes``, attributes of other objects are set."""
    return _replaced(value, f, attributes, {})


def _replaced(
    value: Any, f: Callable[[Tensor], Any], attributes: bool, made: dict[int, Any]
) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    kind = _kind(type(value))
    if kind == _SEQUENCE:
        return rebuild(value, [_replaced(v, f, attributes, made) for v in value])
    if kind == _DICT:
        return refill(value, {k: _replaced(v, f, attributes, made) for k, v in value.items()})
    if kind == _OTHER or (kind == _OBJECT and not attributes):
        return value
    if id(value) not in made:
        made[id(value)] = value  # for an object that refers to itself
        before = _of_fields(value) if kind == _DATACLASS else dict(vars(value))
        after = {k: _replaced(v, f, attributes, made) for k, v in before.items()}
        changes = {k: v for k, v in after.items() if not _same(v, before[k])}
        if changes and kind == _DATACLASS:
            made[id(value)] = copy.copy(value)
        for k, v in changes.items():
            object.__setattr__(made[id(value)], k, v)  # frozen ones, too
    return made[id(value)]


def _same(new: Any, old: Any) -> bool:
    """Returns True if ``new`` is the old value, or a list of the same values."""
    if new is old:
        return True
    if isinstance(new, Tensor) or type(new) is not type(old):
        return False
    kind = _kind(type(new))
    if kind == _DICT:
        return all(map(_same, new.values(), old.values()))
    return kind == _SEQUENCE and all(map(_same, new, old))


def _of_fields(value: Any) -> dict[str, Any]:
    names = [field.name for field in fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _kind_of(of: type) -> int:
    if of is torch.Size:
        return _OTHER
    if issubclass(of, (list, tuple)):
        return _SEQUENCE
    if issubclass(of, dict):
        return _DICT
    if issubclass(of, _OPAQUE) or of.__module__.partition(".")[0] == "disttensor":
        return _OTHER
    if is_dataclass(of):
        return _DATACLASS
    return _OBJECT if getattr(of, "__dictoffset__", 0) else _OTHER


_kind: Callable[[type], int] = lru_cache(maxsize=4096)(_kind_of)
