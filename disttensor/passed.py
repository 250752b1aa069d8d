"""What modules are given, and give: tensors in lists, tuples, dicts and dataclasses, and what a
module gives also in attributes of other objects.

Calls of torch's functions have no more than lists, tuples and dicts (``disttensor.tree``), and many
of them are made for each module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from disttensor.tree import rebuilt, refilled

Tensor = torch.Tensor
_SEQUENCE, _DICT, _DATACLASS, _OBJECT, _OTHER = range(5)
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)


def tensors_in(value: Any, attributes: bool = False) -> list[Tensor]:
    """In order of appearance. ``attributes``: also those of objects that are no dataclass, as a
    distribution. Not of what a module is given: of a cache for all layers it reads its part."""
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
        elif kind != _OTHER and id(value) not in seen:  # an object may lead to itself
            if kind == _DATACLASS:
                seen.add(id(value))
                _collect(_of_fields(value).values(), attributes, out, seen)
            elif attributes:
                seen.add(id(value))
                _collect(vars(value).values(), attributes, out, seen)


def replaced_in(value: Any, f: Callable[[Tensor], Any], attributes: bool = False) -> Any:
    """The same with f(t) for each tensor t. Dataclasses are copied, where one of their tensors is
    another one; with ``attributes`` those of other objects are set."""
    return _replaced(value, f, attributes, {})


def _replaced(
    value: Any, f: Callable[[Tensor], Any], attributes: bool, made: dict[int, Any]
) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    kind = _kind(type(value))
    if kind == _SEQUENCE:
        return rebuilt(value, [_replaced(v, f, attributes, made) for v in value])
    if kind == _DICT:
        return refilled(value, {k: _replaced(v, f, attributes, made) for k, v in value.items()})
    if kind == _OTHER or (kind == _OBJECT and not attributes):
        return value
    if id(value) not in made:
        made[id(value)] = value  # for an object that leads to itself
        before = _of_fields(value) if kind == _DATACLASS else dict(vars(value))
        after = {k: _replaced(v, f, attributes, made) for k, v in before.items()}
        changes = {k: v for k, v in after.items() if not _same(v, before[k])}
        if changes and kind == _DATACLASS:
            made[id(value)] = copy.copy(value)
        for k, v in changes.items():
            object.__setattr__(made[id(value)], k, v)  # frozen ones, too
    return made[id(value)]


def _same(new: Any, old: Any) -> bool:
    """Is it the value from before, or a list of the same values?"""
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
