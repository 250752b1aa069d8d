"""CodeGuard: everything that a forward reads, except its arguments, and whether it has changed.

The code that ran (``CodeWatch``) gives the names of all globals and attributes that a forward can
read. Whatever can be reached from the forward is compared by these names: the attributes of
modules, of classes with their bases and metaclasses, of objects, slots and functions; globals;
closures and defaults; and the elements of containers. The modules have ``ModuleGuard``, which is
notified of changes. A value of a class that is not known here is a reason not to record.
"""

from __future__ import annotations

import array
import functools
import importlib.util
import inspect
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from disttensor.autograd import token
from disttensor.pytree import CONSTANTS
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from disttensor.torch_private import storage_id
from disttensor.trace.code_watch import UNSEEN, CodeWatch, Names, is_known, names_in
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.module_guard import ModuleGuard, has_hooks
from disttensor.trace.name_guard import CONTAINERS, NameGuard

Tensor = torch.Tensor
Code = Mapping[types.CodeType, dict[str, Any]]

_FIELD: Any = type(Names.globals)
_GUESSES = 100  # functions that may run in the first call
_MOST = 20_000  # values that are followed
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# Methods that code may call without naming them.
_CALLED = frozenset({
    "forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__",
    "__get__", "__enter__", "__exit__", "__bool__", "__contains__", "__missing__", "__eq__",
    "__hash__", "__torch_function__",
})  # fmt: skip
# The parts of values that hold others. What has no parts cannot change, or is asked in each call.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    types.MethodType: lambda v: (v.__func__, v.__self__),
    types.BuiltinFunctionType: lambda v: (v.__self__,),
    functools.partial: lambda v: (v.func, v.args, v.keywords, vars(v)),
    functools.partialmethod: lambda v: (v.func, v.args, v.keywords),
    staticmethod: lambda v: (v.__func__,),
    classmethod: lambda v: (v.__func__,),
    property: lambda v: (v.fget,),
    type(functools.lru_cache(is_known)): lambda v: (v.__wrapped__,),
    functools.cached_property: lambda v: (v.func,),
} | dict.fromkeys((
    bytes, range, slice, types.CodeType, re.Pattern, np.dtype, np.ufunc, object, np.bool_,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
    types.GenericAlias, types.UnionType, type(NotImplemented), torch.Generator, _FIELD,
), lambda v: ())  # fmt: skip
_CONSTANT_MODULES = ("logging", "typing", "abc", "disttensor", "ops", "reshard")


class CodeGuard:
    """``tensors``: all tensors that a forward may read except its arguments, each once. ``why``:
    the reason for not recording it, or "". ``ran``: the code that has run. Before the first run,
    ``code`` also has the functions that the forward seems to call."""

    def __init__(self, target: Any, ran: Code | None = None, dynamic: bool = False) -> None:
        self.target, self.ran, self.dynamic = target, dict(ran or {}), dynamic
        self._guesses = 0 if ran else _GUESSES
        self._find()
        if self.why and self._guesses:
            self._guesses = 0
            self._find()
        self._finish()

    def including(self, watch: CodeWatch) -> CodeGuard:
        """Returns a guard that also knows the code that ran: this one, if it does."""
        self.ran |= watch.code
        known = self.code.keys() | set().union(*map(_inner, self.code))
        if watch.code.keys() <= known and (self.dynamic or not watch.dynamic):
            return self
        new = CodeGuard(self.target, self.ran, self.dynamic or watch.dynamic)
        new.why = new.why or new._not_found(watch.code)
        return new

    # Finding values that are read -----------------------------------------------------------------

    def _find(self) -> None:
        self.code: dict[types.CodeType, dict[str, Any]] = {**self.ran, **_first_code(self.target)}
        self.names: set[str] = set(_CALLED)
        size = None
        self.why = ""
        while size != (size := (len(self.code), len(self.names))) and not self.why:
            names = [names_in(code) for code in self.code]
            self.names |= set().union(*(n.attributes for n in names))
            self.dynamic = self.dynamic or "__dict__" in self.names
            self._tried = set[str]().union(*(n.tried for n in names))
            self._walk([*self.code.items()], names)  # adds strings that may be names, and guesses

    def _walk(self, known: list[tuple[types.CodeType, dict[str, Any]]], names: list[Names]) -> None:
        self.trees: list[ModuleGuard] = []
        self.tensors: list[Any] = []
        self._values = NameGuard()
        self._seen: dict[int, Any] = {}
        self._roots: list[nn.Module] = []
        self._classes: set[type] = set()
        self._functions: set[types.CodeType] = set()
        self._queue = deque([self.target])
        self._drain()
        for (code, table), read in zip(known, names, strict=True):
            owner, wanted = table.get("__name__", code.co_filename), read.globals
            wanted |= self.names & table.keys() if self.dynamic else frozenset()
            self._add(self._values.table(owner, table, sorted(wanted)))
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
            if value.isidentifier():
                self.names.add(value)
        elif kind in CONSTANTS or id(value) in self._seen:
            return
        else:
            self._seen[id(value)] = value
            if len(self._seen) > _MOST:
                self.why = f"it can reach more than {_MOST} values"
            elif isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, types.ModuleType):
                self._python_module(value)
            elif isinstance(value, type):
                self._class(value)
            elif kind is types.FunctionType:
                self._function(value)
            elif kind in _PARTS:
                self._add(_PARTS[kind](value))
            else:
                self._object(value, kind)

    def _module(self, module: nn.Module) -> None:
        tree = ModuleGuard(module)
        self.trees.append(tree)
        if module is not self.target:
            self._roots.append(module)
        for m in tree.modules:
            self._seen[id(m)] = m
            self._class(type(m))
            known, read = is_known(type(m).__module__), []
            for name in [*m.__dict__]:
                hooks = name.endswith("_hooks") or "_hooks_" in name
                if not hooks and name not in _TABLES and (known or self._reads(name)):
                    read.append(name)
            owner = type(m).__qualname__
            self._add(self._values.table(owner, m.__dict__, [] if known else read))
            self._add(m.__dict__[name] for name in read if known)
        for t in tree.tensors:
            if id(t) not in self._seen:
                self._seen[id(t)] = t
                self.tensors.append(t)
        if tree.hooked or (module is not self.target and has_hooks(module)):
            self.why = "there are hooks on modules in it"

    def _python_module(self, module: types.ModuleType) -> None:
        """Follows what is read of a module; of torch and of Python's library, functions may be
        replaced, and the rest is known."""
        name, table = module.__name__, vars(module)
        read = sorted(n for n in self.names if n in table)
        if not is_known(name):
            read += sorted(n for n in self._tried if n not in table)
        found = self._values.table(name, table, read)
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
        read = sorted(n for n in table if whole or self._reads(n)) + sorted(hidden)
        if self._tried:
            self._values.size(owner, table)
        self._add(self._values.table(owner, table, read))

    def _class(self, kind: type) -> None:
        """Follows the attributes of a class, of its bases and of its metaclass that are read."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        if not is_known(type(kind).__module__):
            self._class(type(kind))
        bases = kind.__mro__[:-1]
        users = [b for b in bases if not is_known(b.__module__)]
        names = sorted({n for b in users for n in vars(b) if self._reads(n) and n not in _UNREAD})
        for b in users:
            if self._tried:
                self._values.size(b.__qualname__, vars(b))
            self._add(self._values.table(b.__qualname__, vars(b), names))
        for b in bases:
            if b not in users and b not in self._classes:
                self._classes.add(b)
                self._values.table(b.__qualname__, vars(b), sorted(_CALLED & vars(b).keys()))

    def _function(self, f: types.FunctionType) -> None:
        known = is_known(f.__globals__.get("__name__", ""), f.__code__.co_filename)
        ran = f.__code__ in self.code
        self._functions.add(f.__code__)
        if not (ran or known) and len(self.code) < self._guesses:
            self.code[f.__code__] = f.__globals__
        if ran or (known and f.__closure__):
            self._add(self._values.function(f, closure=True))
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
        if isinstance(value, (np.ndarray, array.array, bytearray)):
            self._values.content(value)
            return
        users = [b for b in kind.__mro__ if not is_known(b.__module__)]
        if any("__getattribute__" in vars(b) for b in users):
            self.why = f"it reads a {kind.__qualname__}, which has a __getattribute__ of its own"
            return
        holds = isinstance(value, (*CONTAINERS, types.MappingProxyType))
        table = getattr(value, "__dict__", None)
        slotted = any("__slots__" in vars(b) for b in kind.__mro__)
        seen = holds or isinstance(table, dict) or slotted
        if not seen or not roots.isdisjoint(UNSEEN) or inspect.isgenerator(value):
            self.why = f"it reads a {kind.__qualname__}, whose changes cannot be seen"
            return
        if kind not in CONTAINERS:
            self._class(kind)
        if holds:
            self._add(self._values.elements(value))
        if isinstance(table, dict):
            # Code of Python's library and of torch reads attributes that no user's code names.
            whole = any(is_known(b.__module__) for b in kind.__mro__[:-1] if b not in CONTAINERS)
            hidden = {n for b in users for n in vars(b) if n not in table and self._reads(n)}
            self._attributes(kind.__qualname__, table, whole, hidden)
        for base in kind.__mro__ if slotted else ():
            for name, descriptor in vars(base).items():
                if type(descriptor) is types.MemberDescriptorType:
                    self._add([self._values.slot(value, name, descriptor)])

    def _not_found(self, ran: Code) -> str:
        """Returns the reason for not recording code that ran, if its closure was not found."""
        found = self._functions.union(*map(_inner, ran))
        for code in ran:
            if code.co_freevars and code not in found:
                return f"it runs {code.co_qualname}, which no name that it reads leads to"
        return ""

    # Finding changes ------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.ids = {id(t) for t in self.tensors}
        self._dist = [wait_for(t) for t in self.tensors if isinstance(t, DistTensor)]
        self._plain = [t for t in self.tensors if not isinstance(t, DistTensor)]
        self._tables = [
            (table, list(table.values()))
            for tree in self.trees
            for m in tree.modules
            for table in (m._parameters, m._buffers, m._modules)
            if table
        ]
        self._replaced = token.replacements[0]
        self._states: dict[Any, int] = {}
        self._looked = -1
        self.memory: set[int] = set()  # of the tensors, see ``state``
        self._state = 0

    def change(self) -> str:
        """Returns what has changed, except training flags and ``state``, or ""."""
        for tree in self.trees:
            if not tree.unchanged():
                return f"{type(tree.modules[0]).__qualname__} or a module in it"
        if not self._same_tensors():
            return "a parameter, a buffer or a child of a module"
        if any(map(has_hooks, self._roots)):
            return "hooks of a module"
        return self._values.change()

    def owns(self, value: Any) -> bool:
        """Returns True for a list, dict, set or another container that the forward may read."""
        return id(value) in self._values.mutable

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
            locals_ = [*(t.local for t in self._dist), *self._plain]
            self.memory = {storage_id(t.untyped_storage()) for t in locals_}
        return self._state

    def flags(self) -> tuple[Any, ...]:
        """Returns ``training`` of all modules."""
        trees = self.trees
        return trees[0].flags() if len(trees) == 1 else tuple([t.flags() for t in trees])

    def marks(self) -> list[Any]:
        """Returns a value that changes if a forward assigns to attributes."""
        return [(tree.changes, tree.attributes()) for tree in self.trees]


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
