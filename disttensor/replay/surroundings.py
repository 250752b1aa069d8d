"""Surroundings: what a function or a module reads besides its arguments, as far as that can be
seen, and whether it is as it was.

Of modules: parameters, buffers, attributes and hooks, of all in the tree (``meta.guards.Subtree``,
which is told of changes), lists, dicts and constants that they hold, constants among the globals of
their code. Of functions: closures, defaults, globals, and those of the user's functions among them.
Of other objects: which object it is, and no more.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

from disttensor.autograd import token
from disttensor.meta.guards import Subtree, has_hooks
from disttensor.meta.trace import CONSTANTS
from disttensor.tensor.base import collector_of
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor

_NONE = object()
_DEEP = 8  # how far lists and functions in each other are followed
_OURS = ("torch", "disttensor", "ops", "reshard", "numpy", "builtins", "functools", "math")
_HOOKS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class Surroundings:
    """``tensors``: all that a forward may start from besides its arguments, each once. ``why``: it
    is not to be recorded as it is; "": it is."""

    def __init__(self, target: Any) -> None:
        self.trees: list[Subtree] = []
        self.tensors: list[Any] = []
        self.why = ""
        self._cells: list[tuple[Any, Any]] = []
        self._items: list[tuple[dict[str, Any], str, Any]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        self._roots: list[nn.Module] = []
        if isinstance(target, nn.Module):
            self._module(target, root=True)
        else:
            self._value(target, 0)
        self.ids = {id(t) for t in self.tensors}
        self._dist = [t for t in self.tensors if type(t) is DistTensor]
        self._plain = [t for t in self.tensors if type(t) is not DistTensor]
        self._tables = [
            (table, list(table.values()))
            for tree in self.trees
            for m in tree.modules
            for table in (m._parameters, m._buffers)
            if table
        ]
        self._replaced = token.replaced[0]
        self._states: dict[Any, int] = {}
        self._looked = -1
        self._state = 0
        if any(collector_of(t) is not None for t in self._dist):
            self.why = "its parameters are in sharded segments (shard_data_parallel)"

    # Looking --------------------------------------------------------------------------------------

    def _tensor(self, t: Any) -> None:
        if id(t) not in self._seen:
            self._seen.add(id(t))
            self.tensors.append(t)

    def _module(self, module: nn.Module, root: bool = False) -> None:
        if id(module) in self._seen:
            return
        tree = Subtree(module)
        self.trees.append(tree)
        if not root:
            self._roots.append(module)
        for m in tree.modules:
            self._seen.add(id(m))
            if not type(m).__module__.startswith("torch.nn"):
                self._code_of_class(type(m))
            for name, value in m.__dict__.items():
                if name in _HOOKS or name.endswith("_hooks") or "_hooks_" in name:
                    continue
                if isinstance(value, Tensor):
                    self._tensor(value)
                elif type(value) in (list, tuple, dict, set) and value:
                    self._value(value, 0)
        for t in tree.tensors:
            self._tensor(t)
        if tree.hooked or (not root and has_hooks(module)):
            self.why = "there are hooks on modules in it"

    def _code_of_class(self, kind: type) -> None:
        """Constants and tensors among the globals of the methods of a module."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        self._kept.append(kind)
        for found in vars(kind).values():
            if isinstance(found, types.FunctionType):
                for name, value in _globals_of(found):
                    if type(value) in CONSTANTS or isinstance(value, Tensor):
                        self._items.append((found.__globals__, name, value))
                    if isinstance(value, Tensor):
                        self._tensor(value)

    def _value(self, value: Any, depth: int) -> None:
        """Follow a value that a function can reach."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif type(value) in CONSTANTS or id(value) in self._seen or depth > _DEEP:
            return
        else:
            self._seen.add(id(value))
            self._kept.append(value)
            for part in self._parts(value):
                self._value(part, depth + 1)

    def _parts(self, value: Any) -> Iterator[Any]:
        """What a value is made of; and what would show that it has changed."""
        if type(value) in (list, dict, set, tuple):
            parts = _elements(value)
            if type(value) is not tuple:
                self._lists.append((value, parts))
            yield from parts
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            if (value.__module__ or "").split(".")[0] in _OURS:
                return
            for cell in value.__closure__ or ():
                content = _content(cell)
                self._cells.append((cell, content))
                yield content
            for name, found in _globals_of(value):
                self._items.append((value.__globals__, name, found))
                yield found
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
        elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
            kind = type(value)
            if kind.__module__.split(".")[0] in _OURS:
                return
            for name, found in vars(value).items():
                if type(found) in CONSTANTS or isinstance(found, (Tensor, nn.Module)):
                    self._items.append((value.__dict__, name, found))
                    yield found
            call = getattr(kind, "__call__", None)  # noqa: B004
            if isinstance(call, types.FunctionType):
                yield call

    # Asking ---------------------------------------------------------------------------------------

    def unchanged(self) -> bool:
        """Is all as it was, but for training flags and what ``state`` says?"""
        for tree in self.trees:
            if not tree.unchanged():
                return False
        for cell, content in self._cells:
            now = _content(cell)
            if now is not content and not _equal(now, content):
                return False
        for names, name, value in self._items:
            now = names.get(name, _NONE)
            if now is not value and not _equal(now, value):
                return False
        for value, parts in self._lists:
            if not _same(_elements(value), parts):
                return False
        return self._same_tensors() and not any(map(has_hooks, self._roots))

    def _same_tensors(self) -> bool:
        """Do modules have the same tensors? Sharded state is shown past the guards, and counts
        when it shows others."""
        if self._replaced == token.replaced[0]:
            return True
        self._replaced = token.replaced[0]
        return all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in self._tables
        )

    def state(self) -> int:
        """A number for the specs and ``requires_grad`` of the tensors. To look at them all would
        bring them all into the cache: they are looked at when some tensor of the process has
        changed."""
        if self._looked != token.replaced[0] or self._plain:
            self._looked = token.replaced[0]
            flags = [t.local.requires_grad for t in self._dist]
            flags += [t.requires_grad for t in self._plain]
            key = tuple([t.spec for t in self._dist]), tuple(flags)
            self._state = self._states.setdefault(key, len(self._states))
        return self._state

    def flags(self) -> tuple[Any, ...]:
        """``training`` of all modules."""
        trees = self.trees
        return trees[0].flags() if len(trees) == 1 else tuple([t.flags() for t in trees])

    def marks(self) -> list[Any]:
        """What a forward that assigns to attributes changes."""
        return [(tree.changes, tree.attributes()) for tree in self.trees]


def _elements(value: Any) -> list[Any]:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return list(value)


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and (all(map(is_, now, then)) or all(map(_alike, now, then)))


def _alike(now: Any, then: Any) -> bool:
    return now is then or _equal(now, then)


def _equal(now: Any, then: Any) -> bool:
    """Two constants of one type and value."""
    return type(now) is type(then) and type(now) in CONSTANTS and bool(now == then)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NONE


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: types.CodeType) -> set[str]:
    """The names that code reads which may be globals, also in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
