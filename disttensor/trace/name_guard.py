"""NameGuard: values that Python code reads, their places, and whether they have changed."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np

from disttensor.pytree import CONSTANTS

_NONE = object()
_NONES = repeat(_NONE)
CONTAINERS = (list, dict, set, tuple, deque)


class NameGuard:
    def __init__(self) -> None:
        self._names: dict[int, tuple[Mapping[str, Any], list[str], list[Any]]] = {}
        self._cells: list[tuple[Any, Any]] = []
        self._whole: list[tuple[Any, list[Any]]] = []
        self._codes: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._kept: list[Any] = []  # keeps objects alive whose ids are used

    def name(self, owner: Any, table: Mapping[str, Any], name: str) -> bool:
        """Records that code reads ``name`` of ``owner``, with the names ``table``; True if new."""
        _, names, values = self._names.setdefault(id(owner), (table, [], []))
        if name in names:
            return False
        self._kept.append(owner)
        names.append(name)
        values.append(table.get(name, _NONE))
        return True

    def function(self, f: types.FunctionType) -> list[Any]:
        """Records the code, defaults and closure of ``f``, and returns the values in them."""
        contents = [_content(cell) for cell in f.__closure__ or ()]
        self._cells += zip(f.__closure__ or (), contents, strict=True)
        self._codes.append((f, f.__code__, f.__defaults__, f.__kwdefaults__))
        return [*contents, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]

    def elements(self, value: Any) -> list[Any]:
        """Records and returns the elements of a container."""
        parts = _elements(value)
        if type(value) is not tuple:
            self._whole.append((value, parts))
        return parts

    def array(self, value: np.ndarray[Any, Any]) -> None:
        self._arrays.append((value, value.copy()))

    def unchanged(self) -> bool:
        """Returns True if all recorded values are unchanged."""
        for table, names, values in self._names.values():
            if not all(map(is_, map(table.get, names, _NONES), values)) and not _same(
                list(map(table.get, names, _NONES)), values
            ):
                return False
        for cell, content in self._cells:
            found = _content(cell)
            if found is not content and not equal(found, content):
                return False
        for value, parts in self._whole:
            if not _same(_elements(value), parts):
                return False
        for f, code, defaults, keywords in self._codes:
            if (
                f.__code__ is not code
                or f.__defaults__ is not defaults
                or f.__kwdefaults__ is not keywords
            ):
                return False
        return not self._arrays or all(
            a.shape == was.shape and a.dtype == was.dtype and a.tobytes() == was.tobytes()
            for a, was in self._arrays
        )


def _elements(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value)


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and (all(map(is_, now, then)) or all(map(_alike, now, then)))


def _alike(now: Any, then: Any) -> bool:
    return now is then or equal(now, then)


def equal(now: Any, then: Any) -> bool:
    """Returns True if two constants have the same type and value; 0.0 is not -0.0."""
    same = type(now) is type(then) and type(now) in CONSTANTS and bool(now == then)
    return same and (type(now) not in (float, complex) or repr(now) == repr(then))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NONE


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes that code reads, also in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names
