"""CodeGuard: everything that a function or a module reads, except its arguments, as far as it
can be found, and whether it has changed.

Modules: parameters, buffers, attributes and hooks of the whole tree (``ModuleGuard``, which
is notified of changes), and everything that their methods read. Functions and methods: code,
closures, defaults, globals, attributes of modules and classes by their names. Objects that one of
these reads: their attributes and the attributes of their classes. Objects in objects: their
identity only. Code of torch and of Python's own library is left out.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from disttensor.autograd import token
from disttensor.pytree import CONSTANTS
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from disttensor.trace.module_guard import ModuleGuard, has_hooks
from disttensor.trace.name_guard import CONTAINERS, NameGuard, names_in

Tensor = torch.Tensor
Names = frozenset[str]

_DEEP = 8  # depth to which values and functions in each other are followed
_OURS = frozenset({"torch", "disttensor", "ops", "reshard", "numpy"})
_STDLIB = os.path.dirname(os.__file__)
_HOOKS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# Methods of a module or another object that code may call without naming them.
_CALLED = frozenset({"forward", "__call__", "__getattr__", "__getitem__", "__iter__", "__len__"})


class CodeGuard:
    """``tensors``: all tensors that a forward may read except its arguments, each once. ``why``:
    the reason for not recording it, or ""."""

    def __init__(self, target: Any) -> None:
        self.trees: list[ModuleGuard] = []
        self.tensors: list[Any] = []
        self.why = ""
        self._reads = NameGuard()
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        self._roots: list[nn.Module] = []
        if isinstance(target, nn.Module):
            self._module(target, root=True)
        else:
            self._value(target, 0, _CALLED)
        self.ids = {id(t) for t in self.tensors}
        self._dist = [wait_for(t) for t in self.tensors if isinstance(t, DistTensor)]
        self._plain = [t for t in self.tensors if not isinstance(t, DistTensor)]
        self._tables = [
            (table, list(table.values()))
            for tree in self.trees
            for m in tree.modules
            for table in (m._parameters, m._buffers)
            if table
        ]
        self._replaced = token.replacements[0]
        self._states: dict[Any, int] = {}
        self._looked = -1
        self._state = 0

    # Finding values that are read -----------------------------------------------------------------

    def _tensor(self, t: Any) -> None:
        if id(t) not in self._seen:
            self._seen.add(id(t))
            self.tensors.append(t)

    def _module(self, module: nn.Module, root: bool = False) -> None:
        if id(module) in self._seen:
            return
        tree = ModuleGuard(module)
        self.trees.append(tree)
        if not root:
            self._roots.append(module)
        self._seen.update(map(id, tree.modules))
        for m in tree.modules:
            names = self._code_of(type(m), _CALLED, 0)
            for name, value in list(m.__dict__.items()):
                if name in _HOOKS or name.endswith("_hooks") or "_hooks_" in name:
                    continue
                if name != "forward" or isinstance(value, types.FunctionType):
                    self._value(value, 0, names)
        for t in tree.tensors:
            self._tensor(t)
        if tree.hooked or (not root and has_hooks(module)):
            self.why = "there are hooks on modules in it"

    def _code_of(self, kind: type, names: Names, depth: int) -> Names:
        """Follows the methods and attributes of a class with these ``names``, and everything that
        they call. Returns all names."""
        kinds = [k for k in kind.__mro__ if not _ours(k.__module__)]
        todo, known = set(names), set(names)
        while kinds and todo:
            name = todo.pop()
            for found in [vars(k).get(name) for k in kinds if name in vars(k)]:
                inner = getattr(found, "fget", getattr(found, "__func__", found))
                inner = inspect.unwrap(inner) if callable(inner) else inner
                if isinstance(inner, types.FunctionType):
                    new = names_in(inner.__code__) - known
                    todo |= new
                    known |= new
        reached = frozenset(known)
        used = {n for k in kinds for n in reached if n in vars(k)}
        for k in kinds:
            for name in used:
                if self._reads.name(k, vars(k), name) and name in vars(k):
                    found = vars(k)[name]
                    self._value(getattr(found, "fget", found), depth + 1, reached)
        return reached

    def _value(self, value: Any, depth: int, names: Names) -> None:
        """Follows a value that code with these ``names`` may read."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif type(value) in CONSTANTS or depth > _DEEP:
            return
        elif isinstance(value, (types.ModuleType, type)):
            self._attributes(value, depth, names)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            for part, inside in self._parts(value, depth, names):
                self._value(part, depth + 1, inside)

    def _attributes(self, owner: Any, depth: int, names: Names) -> None:
        """Follows the attributes of modules and classes with these names."""
        if isinstance(owner, type):
            if not _ours(owner.__module__):
                self._code_of(owner, names, depth)
        elif not _ours(owner.__name__):
            for name in names:
                if name in vars(owner) and self._reads.name(owner, vars(owner), name):
                    self._value(vars(owner)[name], depth + 1, names)

    def _parts(self, value: Any, depth: int, names: Names) -> Iterator[tuple[Any, Names]]:
        """Yields the parts of a value, and the names that are read of each part."""
        parts: Iterable[Any] = ()
        if isinstance(value, CONTAINERS):
            parts = self._reads.elements(value)
        elif isinstance(value, np.ndarray):
            self._reads.array(value)
        elif isinstance(value, _generators()) and value is not getattr(random, "_inst", None):
            self.why = "it reads a generator of random numbers that is not torch's"
        elif isinstance(value, functools.partial):
            parts = value.func, *value.args, *value.keywords.values()
        elif isinstance(value, types.MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, (staticmethod, classmethod)):
            parts = (value.__func__,)
        elif isinstance(value, types.FunctionType):
            if not _ours(value.__module__ or ""):
                names = frozenset(names_in(value.__code__))
                parts = [*self._reads.function(value), *self._globals(value, names)]
        elif hasattr(value, "__wrapped__"):
            parts = (value.__wrapped__,)
        elif hasattr(value, "__dict__") and not _ours(type(value).__module__):
            names = self._code_of(type(value), names | _CALLED, depth)
            parts = [
                part
                for part in self._reads.elements(value.__dict__)
                if not _is_object(part)  # only its identity counts
            ]
        for part in parts:
            yield part, names

    def _globals(self, f: types.FunctionType, names: Names) -> Iterator[Any]:
        for name in names:
            if name in f.__globals__ and self._reads.name(f.__globals__, f.__globals__, name):
                yield f.__globals__[name]

    # Finding changes ------------------------------------------------------------------------------

    def unchanged(self) -> bool:
        """Returns True if nothing changed, except training flags and ``state``."""
        for tree in self.trees:
            if not tree.unchanged():
                return False
        return (
            self._reads.unchanged()
            and self._same_tensors()
            and not any(map(has_hooks, self._roots))
        )

    def _same_tensors(self) -> bool:
        """Returns True if modules have the same tensors. Sharded state is shown without notice to
        the guards; showing other tensors counts as a change."""
        if self._replaced == token.replacements[0]:
            return True
        self._replaced = token.replacements[0]
        return all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in self._tables
        )

    def state(self) -> int:
        """Returns a number for the specs, strides and ``requires_grad`` of the tensors. They are
        compared only after a change of some tensor of the process, as reading them all would load
        them into the cache."""
        if self._looked != token.replacements[0] or self._plain:
            self._looked = token.replacements[0]
            key = (
                tuple([(t.spec, t.local.requires_grad, t.local.stride()) for t in self._dist]),
                tuple([
                    (t.requires_grad, t.shape, t.stride(), t.dtype, t.device) for t in self._plain
                ]),
            )  # fmt: skip
            self._state = self._states.setdefault(key, len(self._states))
        return self._state

    def flags(self) -> tuple[Any, ...]:
        """Returns ``training`` of all modules."""
        trees = self.trees
        return trees[0].flags() if len(trees) == 1 else tuple([t.flags() for t in trees])

    def marks(self) -> list[Any]:
        """Returns a value that changes if a forward assigns to attributes."""
        return [(tree.changes, tree.attributes()) for tree in self.trees]


def _generators() -> tuple[type, ...]:
    """Returns the classes of random generators. numpy loads its own on first use."""
    own = sys.modules.get("numpy.random")
    return (random.Random, own.Generator, own.RandomState) if own else (random.Random,)


def _ours(module: str) -> bool:
    """Returns True for code of torch, numpy, Python's own library and this package. A user's module
    may have the name of one of these (``trace``, ``token``)."""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root in _OURS
    file = getattr(sys.modules.get(root), "__file__", None) or _STDLIB
    return file.startswith(_STDLIB) and "site-packages" not in file


def _is_object(value: Any) -> bool:
    """Returns True for an object of a user's class that is no function."""
    known = (Tensor, nn.Module, np.ndarray, type, types.ModuleType, *CONTAINERS, *_generators())
    return not isinstance(value, known) and not callable(value)
