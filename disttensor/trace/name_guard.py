"""NameGuard: values that Python code reads, their places, and which of them has changed."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import repeat
from operator import is_
from typing import Any

from disttensor.pytree import CONSTANTS

_NONE = object()
_NONES = repeat(_NONE)
KEPT = type(functools.lru_cache(len))  # a function whose results are kept
CONTAINERS = (list, dict, set, frozenset, tuple, deque)


class NameGuard:
    def __init__(self) -> None:
        self._tables: list[tuple[str, Mapping[str, Any], list[str], list[Any]]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._slots: list[tuple[str, Any, Any, Any]] = []
        self._variables: list[tuple[ContextVar[Any], Any]] = []
        self._whole: list[tuple[Any, list[Any]]] = []
        self._codes: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self._bytes: list[tuple[Any, bytes, Any]] = []
        self._sizes: list[tuple[str, Mapping[str, Any], int]] = []
        self.mutable: set[int] = set()  # ids of the containers

    def table(self, owner: str, table: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
        """Records the values that ``names`` have in a table, or that they are missing; returns the
        values."""
        names = list(names)
        values = [table.get(name, _NONE) for name in names]
        if names:
            self._tables.append((owner, table, names, values))
        return [v for v in values if v is not _NONE]

    def size(self, owner: str, table: Mapping[str, Any]) -> None:
        """Records how many names a table has."""
        self._sizes.append((owner, table, len(table)))

    def function(self, f: types.FunctionType) -> list[Any]:
        """Records the code and defaults of ``f``, and its closure; returns the values in them."""
        cells = f.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        names = [f"{name} of {f.__qualname__}" for name in f.__code__.co_freevars]
        self._cells += zip(names, cells, contents, strict=True)
        self._codes.append((f, f.__code__, f.__defaults__, f.__kwdefaults__))
        return [*contents, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]

    def slot(self, value: Any, name: str, descriptor: Any) -> Any:
        content = _slot(descriptor, value)
        self._slots.append((f"{name} of {type(value).__qualname__}", value, descriptor, content))
        return content

    def variable(self, value: ContextVar[Any]) -> Any:
        """Records and returns what a context variable has in this context."""
        self._variables.append((value, found := value.get(_NONE)))
        return found

    def elements(self, value: Any) -> list[Any]:
        """Records and returns the elements of a container."""
        parts = _elements(value)
        if type(value) not in (tuple, frozenset):
            self._whole.append((value, parts))
            self.mutable.add(id(value))
        return parts

    def content(self, value: Any) -> None:
        """Records the bytes of an array."""
        self._bytes.append((value, bytes(value), _form(value)))

    def change(self) -> str:
        """Returns the name of a recorded value that has changed, or ""."""
        for owner, table, names, values in self._tables:
            if not all(map(is_, map(table.get, names, _NONES), values)):
                for name, then in zip(names, values, strict=True):
                    if not _alike(table.get(name, _NONE), then):
                        return f"{name} of {owner}"
        for owner, table, count in self._sizes:
            if len(table) != count:
                return f"an attribute of {owner}"
        for name, cell, content in self._cells:
            found = _content(cell)
            if found is not content and not equal(found, content):
                return name
        for name, value, descriptor, content in self._slots:
            if not _alike(_slot(descriptor, value), content):
                return name
        for variable, content in self._variables:
            if not _alike(variable.get(_NONE), content):
                return f"the context variable {variable.name}"
        for value, parts in self._whole:
            if not _same(_elements(value), parts):
                return f"a {type(value).__name__}"
        for f, code, defaults, keywords in self._codes:
            if f.__code__ is not code or not (
                f.__defaults__ is defaults and f.__kwdefaults__ is keywords
            ):
                return f"the code or the defaults of {f.__qualname__}"
        for value, was, form in self._bytes:
            if _form(value) != form or bytes(value) != was:
                return f"a {type(value).__name__}"
        return ""


def _elements(value: Any) -> list[Any]:
    if isinstance(value, (dict, types.MappingProxyType)):
        return [*value.keys(), *value.values()]
    if type(value) is KEPT:  # its arguments and results, which have no order
        held = [p for p in gc.get_referents(value) if not _holds_links(p)]
        return sorted(held, key=id)
    return list(value)


def _holds_links(part: Any) -> bool:
    """Returns True for the table of a ``functools.lru_cache`` that links its results."""
    links = part.values() if type(part) is dict else ()
    return any(type(link).__name__ == "_lru_list_elem" for link in links)


def _form(array: Any) -> Any:
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _slot(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return _NONE


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
