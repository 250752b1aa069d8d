"""Reach: the values that a forward can read, found from the names in its code.

The code that ran (``CodeWatch``) gives the names of all globals and attributes that a forward can
read. Everything that these names lead to is followed: attributes of modules, of classes with their
bases and metaclasses, of objects, slots and functions; globals; closures and defaults; and elements
of containers. A value of a class that is not known here is a reason not to record.
"""

from __future__ import annotations

import array
import builtins
import functools
import importlib.util
import inspect
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from disttensor.pytree import CONSTANTS
from disttensor.tensor.user_facts import user_attributes
from disttensor.trace.code_watch import UNSEEN, Names, identifiers, is_known, names_in
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.module_guard import ModuleGuard, has_hooks
from disttensor.trace.name_guard import CONTAINERS, KEPT, NameGuard

Tensor = torch.Tensor
Code = Mapping[types.CodeType, dict[str, Any]]

_FIELD: Any = type(Names.globals)
_GUESSES = 100  # functions that may run in the first call
_MOST = 20_000  # values that are followed
# Answers that change without a value that a guard can compare.
_UNSEEN_NAMES = frozenset({"_version", "initial_seed", "import_module", "__import__"})
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# Methods that code may call without naming them.
_CALLED = frozenset({
    "forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__",
    "__get__", "__enter__", "__exit__", "__bool__", "__contains__", "__missing__", "__eq__",
    "__hash__", "__torch_function__",
})  # fmt: skip
# The parts of values that hold others. A value without parts is constant, or read in each call.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.MethodType: lambda v: (v.__func__, v.__self__),
    types.BuiltinFunctionType: lambda v: (v.__self__,),
    functools.partial: lambda v: (v.func, v.args, v.keywords, vars(v)),
    functools.partialmethod: lambda v: (v.func, v.args, v.keywords),
    staticmethod: lambda v: (v.__func__,),
    classmethod: lambda v: (v.__func__,),
    property: lambda v: (v.fget,),
    functools.cached_property: lambda v: (v.func,),
} | dict.fromkeys((
    bytes, range, slice, types.CodeType, re.Pattern, np.dtype, np.ufunc, object, np.bool_,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
    types.GenericAlias, types.UnionType, type(NotImplemented), torch.Generator, _FIELD,
), lambda v: ())  # fmt: skip
_PLAIN = (*CONTAINERS, np.ndarray, Tensor)
_CONSTANT_MODULES = ("logging", "typing", "abc", "disttensor", "ops", "reshard")


class Reach:
    """The values that ``target`` can read.

    ran, code   the code that has run; before the first run, ``code`` also has the functions that
                the target seems to call
    names       the names of attributes in the code; ``dynamic``: all attributes count
    computes    the code that ran has computed names of attributes
    values      compares the values that are read, at their places
    trees       the guards of the modules; ``roots``: the modules that are not the target
    tensors     the tensors that are read, each once
    why         the reason for not recording the target, or ""
    """

    def __init__(self, target: Any, ran: Code, dynamic: bool) -> None:
        self.target, self.ran, self.dynamic = target, dict(ran), dynamic
        self.computes = dynamic
        self._guesses = 0 if ran else _GUESSES
        self._find()
        if self.why and self._guesses:
            self._guesses = 0
            self._find()

    def knows(self, code: Code) -> bool:
        return code.keys() <= self.code.keys() | set().union(*map(_inner, self.code))

    def _find(self) -> None:
        self.code: dict[types.CodeType, dict[str, Any]] = {**self.ran, **_first_code(self.target)}
        self.names: set[str] = set(_CALLED)
        size = None
        self.why = ""
        while size != (size := (len(self.code), len(self.names))) and not self.why:
            names = [names_in(code) for code in self.code]
            read = set[str]().union(*(n.attributes | n.globals for n in names))
            self.names |= set[str]().union(*(n.attributes for n in names))
            self.dynamic = self.computes or "__dict__" in self.names
            self.dynamic = self.dynamic or any(n.dynamic for n in names)
            self._tried = set[str]().union(*(n.tried for n in names))
            self._stored = set[str]().union(*(n.stored for n in names))
            self._walk([*self.code.items()], names)  # adds strings that may be names, and guesses
            if unseen := _UNSEEN_NAMES & read:
                self.why = self.why or f"it reads {min(unseen)}, which is not compared"

    def _walk(self, known: list[tuple[types.CodeType, dict[str, Any]]], names: list[Names]) -> None:
        self.trees: list[ModuleGuard] = []
        self.tensors: list[Any] = []
        self.values = NameGuard()
        self._seen: dict[int, Any] = {}
        self.roots: list[nn.Module] = []
        self._classes: set[type] = set()
        self._functions: set[types.CodeType] = set()
        self._queue = deque([self.target])
        self._drain()
        for (code, table), read in zip(known, names, strict=True):
            owner, wanted = table.get("__name__", code.co_filename), read.globals
            wanted |= self.names & table.keys() if self.dynamic else frozenset()
            self._add(self.values.table(owner, table, sorted(wanted)))
            others = sorted(wanted - table.keys())
            self._add(self.values.table("builtins", vars(builtins), others))
            for level, name in sorted(read.imports):
                self._add(_imported(level, name, table))
            self._drain()

    def _add(self, values: Iterable[Any]) -> None:
        self._queue.extend(values)

    def _drain(self) -> None:
        while self._queue and not self.why:
            self._visit(self._queue.popleft())

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self.names |= identifiers(value)
        elif kind in CONSTANTS or id(value) in self._seen:
            return
        else:
            self._seen[id(value)] = value
            if len(self._seen) > _MOST:
                self.why = f"it can reach more than {_MOST} values"
            elif isinstance(value, Tensor):
                self._tensor(value)
            elif isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, types.ModuleType):
                self._python_module(value)
            elif isinstance(value, type):
                self._class(value)
            elif kind is types.FunctionType:
                self._function(value)
            elif kind is KEPT:
                known = is_known(getattr(value, "__module__", None) or "")
                self._add([value.__wrapped__] if known else self.values.elements(value))
            elif kind in _PARTS:
                self._add(_PARTS[kind](value))
            else:
                self._object(value, kind)

    def _module(self, module: nn.Module) -> None:
        tree = ModuleGuard(module)
        self.trees.append(tree)
        if module is not self.target:
            self.roots.append(module)
        for m in tree.modules:
            self._seen[id(m)] = m
            self._class(type(m))
            known, read = is_known(type(m).__module__), []
            for name in [*m.__dict__]:
                hooks = name.endswith("_hooks") or "_hooks_" in name
                if not hooks and name not in _TABLES and (known or self._reads(name)):
                    read.append(name)
            self.values.table(type(m).__qualname__, m.__dict__, [] if known else read)
            self._add(m.__dict__[name] for name in read)
        for t in tree.tensors:
            if id(t) not in self._seen:
                self._seen[id(t)] = t
                self._tensor(t)
        if tree.hooked or (module is not self.target and has_hooks(module)):
            self.why = "there are hooks on modules in it"

    def _tensor(self, x: Tensor) -> None:
        """Follows the attributes that the user has set on a tensor and that are read."""
        self.tensors.append(x)
        if x.__dict__:
            read = [name for name in user_attributes(x) if self._reads(name)]
            self._follow(type(x).__qualname__, x.__dict__, read)

    def _python_module(self, module: types.ModuleType) -> None:
        """Follows what is read of a module; of torch and of Python's library, functions may be
        replaced, and the rest is known."""
        name, table = module.__name__, vars(module)
        if module is sys and "modules" in self.names:
            self.why = "it reads sys.modules, which is not compared"
        read = sorted(n for n in self.names if n in table)
        missing = self._stored if is_known(name) else self._stored | self._tried
        read += sorted(missing - table.keys())
        found = self.values.table(name, table, read)
        if is_known(name):
            found = [v for v in found if isinstance(v, (types.ModuleType, types.FunctionType))]
        self._add(found)

    def _reads(self, name: str) -> bool:
        return self.dynamic or name in self.names

    def _attributes(
        self, owner: str, table: Mapping[str, Any], whole: bool = False, hidden: Iterable[str] = ()
    ) -> None:
        """Follows what is read of a table of attributes, or all. ``hidden``: names of the class
        that an attribute would hide."""
        read = sorted(n for n in table if whole or self._reads(n))
        read += sorted({*hidden, *self._stored} - table.keys())
        if self._tried or self.dynamic:
            self.values.size(owner, table)
        self._follow(owner, table, read)

    def _follow(self, owner: str, table: Mapping[str, Any], read: Sequence[str]) -> None:
        """Follows the values of these names; of objects under names that are not in the code only
        the identity counts."""
        self.values.table(owner, table, read)
        for name in read:
            value = table.get(name)
            if name in self.names or type(value) in CONSTANTS or isinstance(value, _PLAIN):
                self._queue.append(value)

    def _class(self, kind: type) -> None:
        """Follows the attributes of a class, of its bases and of its metaclass that are read."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        if not is_known(type(kind).__module__):
            self._class(type(kind))
        bases = kind.__mro__[:-1]
        users = [b for b in bases if not is_known(b.__module__)]
        table = {n: v for b in users for n, v in vars(b).items()}
        read = {n for n, v in table.items() if self._reads(n) or _is_operator(n, v)}
        names = sorted((read | self._stored) - _UNREAD)
        if users:
            self.values.slot(kind, "the bases", vars(type)["__mro__"])
        for b in users:
            if self._tried or self.dynamic:
                self.values.size(b.__qualname__, vars(b))
            self._follow(b.__qualname__, vars(b), names)
        for b in bases:
            if b not in users and b not in self._classes:
                self._classes.add(b)
                self.values.table(b.__qualname__, vars(b), sorted(_CALLED & vars(b).keys()))

    def _function(self, f: types.FunctionType) -> None:
        known = is_known(f.__globals__.get("__name__", ""), f.__code__.co_filename)
        ran = f.__code__ in self.code
        self._functions.add(f.__code__)
        if not (ran or known) and len(self.code) < self._guesses:
            self.code[f.__code__] = f.__globals__
        if ran or (known and f.__closure__):
            self._add(self.values.function(f))
        if vars(f) or ran:
            self._attributes(f.__qualname__, vars(f), whole=known)

    def _object(self, value: Any, kind: type) -> None:
        """Follows an object: its class, its attributes, its slots and its elements."""
        roots = {b.__module__.partition(".")[0] for b in kind.__mro__[:-1]}
        if isinstance(value, InstanceForward):
            self._add([value.module])
            return
        if not roots.isdisjoint(_CONSTANT_MODULES) or isinstance(value, (np.generic, Exception)):
            return
        if isinstance(value, _generators()):
            if value is not getattr(random, "_inst", None):
                self.why = "it reads a generator of random numbers that is not torch's"
            return
        if isinstance(value, ContextVar):
            self._add([self.values.variable(value)])
            return
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self.why = "it reads an array of objects, whose changes cannot be seen"
            return
        if isinstance(value, (np.ndarray, array.array, bytearray)):
            self.values.content(value)
            return
        users = [b for b in kind.__mro__ if not is_known(b.__module__)]
        computed = any("__getattribute__" in vars(b) for b in users)
        holds = isinstance(value, (*CONTAINERS, types.MappingProxyType))
        try:
            table = object.__getattribute__(value, "__dict__")
        except AttributeError:
            table = None
        slotted = any("__slots__" in vars(b) for b in kind.__mro__)
        seen = holds or isinstance(table, dict) or slotted
        if not seen or not roots.isdisjoint(UNSEEN):
            self.why = f"it reads a {kind.__qualname__}, whose changes cannot be seen"
            return
        if kind not in CONTAINERS:
            self._class(kind)
            self.values.slot(value, "the class", vars(object)["__class__"])
        if holds:
            self._add(self.values.elements(value))
        if isinstance(table, dict):
            # Code of Python's library and of torch reads attributes that no user's code names.
            bases = [b for b in kind.__mro__[:-1] if b not in CONTAINERS]
            whole = computed or any(is_known(b.__module__) for b in bases)
            hidden = {n for b in users for n in vars(b) if n not in table and self._reads(n)}
            self._attributes(kind.__qualname__, table, whole, hidden)
        for base in kind.__mro__ if slotted else ():
            for name, descriptor in vars(base).items():
                if type(descriptor) is types.MemberDescriptorType:
                    self._add([self.values.slot(value, name, descriptor)])

    def not_found(self, ran: Code) -> str:
        """Returns the reason for not recording code that ran, if its closure was not found."""
        found = self._functions.union(*map(_inner, ran))
        for code in ran:
            if code.co_freevars and code not in found:
                return f"it runs {code.co_qualname}, which no name that it reads leads to"
        return ""


def _is_operator(name: str, value: Any) -> bool:
    return name.startswith("__") and callable(value)


_UNREAD = frozenset({"__doc__", "__module__", "__dict__", "__weakref__", "__slots__"})


def _first_code(target: Any) -> Code:
    """Returns the code of a function, or of the forwards of a module, before it has run."""
    modules = target.modules() if isinstance(target, nn.Module) else ()
    found: dict[types.CodeType, dict[str, Any]] = {}
    for f in [type(m).forward for m in modules] or [target]:
        f = f.func if isinstance(f, functools.partial) else f
        if not callable(f):
            continue
        f = inspect.unwrap(getattr(f, "__func__", f))
        function = f if isinstance(f, types.FunctionType) else vars(type(f)).get("__call__")
        if not isinstance(function, types.FunctionType):
            continue
        if not is_known(function.__globals__.get("__name__", ""), function.__code__.co_filename):
            found[function.__code__] = function.__globals__
    return found


def _imported(level: int, name: str, table: Mapping[str, Any]) -> list[Any]:
    """Returns the modules that an import in a function finds."""
    package = table.get("__package__") or ""
    full = importlib.util.resolve_name("." * level + name, package) if level else name
    return [sys.modules[n] for n in (full, full.partition(".")[0]) if n in sys.modules]


def _inner(code: types.CodeType) -> set[types.CodeType]:
    inner = {c for c in code.co_consts if isinstance(c, types.CodeType)}
    return inner.union(*map(_inner, inner))


def _generators() -> tuple[type, ...]:
    """Returns the classes of random generators. numpy loads its own on first use."""
    own = sys.modules.get("numpy.random")
    return (random.Random, own.Generator, own.RandomState) if own else (random.Random,)
