"""CodeWatch: the code of users that runs in a recording, and why guards may not see its reads.

A forward depends on a value only if code that ran has read it. So the names in this code are all
names that ``CodeGuard`` compares, and a branch that was not taken needs no guard: the value that
decided has one. Code of torch, of Python's library and of this package is known, but for functions
that read the clock, the environment, files, or attributes whose names are not in the code.
"""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

# Known packages: ours, torch and what torch calls, and numpy.
_OURS = frozenset({
    "torch", "disttensor", "ops", "reshard", "numpy", "sympy", "mpmath", "networkx", "optree",
    "typing_extensions",
})  # fmt: skip
_STDLIB = os.path.dirname(os.__file__)
_GENERATED = ("<replay>", "<eval_with_key>")  # files of code that torch or a recording made
# Modules of Python's library whose answers change without a value that a guard can compare.
UNSEEN = frozenset({
    "time", "datetime", "_datetime", "io", "_io", "posix", "nt", "genericpath", "pathlib",
    "socket", "_socket", "secrets", "uuid", "subprocess", "threading", "_thread", "weakref",
    "_weakref", "gc", "platform", "tempfile", "ctypes", "_ctypes", "signal", "mmap", "select",
})  # fmt: skip
_CALLBACKS = frozenset({"weakref", "_weakref", "gc"})  # are called at any time
_ENVIRONMENT = ("_Environ.", "getenv", "listdir", "walk")  # in the module os
_REFUSED = frozenset({"eval", "exec", "compile", "input", "open", "id", "_getframe"})
_DYNAMIC = frozenset({"vars", "dir", "locals", "globals"})
# Modules of Python's library that read attributes by names that they compute.
_WALKERS = frozenset({"dataclasses", "copy", "json", "pickle", "pprint", "reprlib"})
_ASKS = frozenset({"getattr", "hasattr", "setattr", "delattr"})
# Functions that may read or set attributes without being called by the code that names them.
_BY_NAME = _ASKS | {"attrgetter", "methodcaller", "__setattr__", "__delattr__"}
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"})
# Loggers, searches in modules and imports: the code that they run has no part in a result.
_SILENT = frozenset({"logging", "warnings", "inspect", "importlib", "_frozen_importlib"})
_BUILDS = frozenset({"format", "join", "replace", "strip", "split", "lower", "upper", "title"})
_USER, _KNOWN, _LIBRARY, _ASIDE = range(4)


class CodeWatch:
    """``with CodeWatch() as watch:`` notes the block's code.

    code       code of a user -> the globals of its function
    why        the reason why no guard sees what was read, or ""
    dynamic    names of attributes were computed, so all attributes count
    """

    def __init__(self) -> None:
        self.code: dict[types.CodeType, dict[str, Any]] = {}
        self.why = ""
        self.dynamic = False
        self._kinds: dict[types.CodeType, int] = {}

    def __enter__(self) -> CodeWatch:
        self._before: Any = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            kind = self._kinds.get(frame.f_code)
            if kind is None:
                kind = self._new(frame)
            if kind == _LIBRARY:
                self._enter_library(frame)
        elif event == "c_call" and self._kinds.get(frame.f_code) == _USER:
            self._call_builtin(frame.f_code, argument)
        if self._before is not None:
            self._before(frame, event, argument)

    def _new(self, frame: types.FrameType) -> int:
        code, module = frame.f_code, _module(frame)
        kind = _KNOWN if is_known(module, code.co_filename) else _USER
        if kind == _USER and (code.co_name == "<module>" or self._caller(frame) == _ASIDE):
            kind = _ASIDE
        elif kind == _USER:
            self.code[code] = frame.f_globals
        elif module.partition(".")[0] in sys.stdlib_module_names:
            kind = _LIBRARY
        self._kinds[code] = kind
        return kind

    def _enter_library(self, frame: types.FrameType) -> None:
        """Notes a function of Python's library that a user calls, perhaps through the library."""
        name, root = frame.f_code.co_qualname, _module(frame).partition(".")[0]
        unseen = root in UNSEEN - _CALLBACKS or (root == "os" and name.startswith(_ENVIRONMENT))
        if not unseen and root not in _WALKERS:
            return
        if self._caller(frame) == _USER:
            if unseen:
                self._refuse(f"{root}.{name}")
            self.dynamic = True

    def _caller(self, frame: types.FrameType) -> int | None:
        """Returns who calls this code, perhaps through Python's library; _ASIDE for a logger."""
        caller = frame.f_back
        while caller is not None and self._kinds.get(caller.f_code) == _LIBRARY:
            if _module(caller).partition(".")[0] in _SILENT:
                return _ASIDE
            caller = caller.f_back
        return None if caller is None else self._kinds.get(caller.f_code)

    def _call_builtin(self, code: types.CodeType, function: Any) -> None:
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            module = function.__module__ or ""
        else:  # a method of an object, or of a class, as ``datetime.now``
            module = (owner if isinstance(owner, type) else type(owner)).__module__
        if module in UNSEEN:
            self._refuse(f"{module}.{name}")
        elif module in ("builtins", "sys"):
            if name in _REFUSED:
                self._refuse(name)
            if name in _DYNAMIC or (name in _ASKS and names_in(code).computes):
                self.dynamic = True

    def _refuse(self, name: str) -> None:
        self.why = self.why or f"it calls {name}, whose answers are not compared"


class Names(NamedTuple):
    """Names that code reads: of globals, of attributes (with its strings), and of modules that it
    imports, with their level.

    tried       may be missing without an error: arguments of ``getattr`` and ``hasattr``, and
                attributes in code that catches errors
    stored      are assigned or deleted
    computes    the code may compute a string, and so the name of an attribute
    dynamic     the code may read an attribute of a computed name
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    tried: frozenset[str]
    stored: frozenset[str]
    computes: bool
    dynamic: bool


@lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Returns the names in code, and in the functions inside it."""
    read, attributes, imports, strings = set[str](), set[str](), set[tuple[int, str]](), set[str]()
    stored = set[str]()
    level: Any = 0
    computes = not _BUILDS.isdisjoint(code.co_names)
    for i in dis.get_instructions(code):
        if i.opname in _STORES:
            stored.add(i.argval)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            read.add(i.argval)
        elif i.opname == "IMPORT_NAME":
            imports.add((level, i.argval))
        elif i.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(i.argval) is int:
            level = i.argval
        elif i.opcode in dis.hasname:
            attributes.add(i.argval)
        computes = computes or i.opname.startswith(("BUILD_STRING", "FORMAT_"))
        computes = computes or (i.opname == "BINARY_OP" and i.argrepr in ("+", "%", "*"))
    inner = []
    for constant in _flat(code.co_consts):
        if isinstance(constant, types.CodeType):
            inner.append(names_in(constant))
        elif isinstance(constant, str):
            strings |= identifiers(constant)
    by_name = not _BY_NAME.isdisjoint(read | attributes)
    tried = set(strings) if by_name else set()
    tried |= attributes if code.co_exceptiontable else set()
    dynamic = (by_name and computes) or any(n.dynamic for n in inner)
    own: list[Any] = [read, attributes | strings, imports, tried, stored]
    *sets, _, _ = zip([*own, computes, dynamic], *inner, strict=True)
    found = [frozenset[Any]().union(*same) for same in sets]
    return Names._make([*found, computes, dynamic])


def identifiers(text: str) -> set[str]:
    """Returns the names in "a" or "a.b", which may be the path of an attribute."""
    names = set(text.split("."))
    return names if all(map(str.isidentifier, names)) else set()


def _flat(constants: Iterable[Any]) -> Iterable[Any]:
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _flat(constant)
        else:
            yield constant


def is_known(module: str, file: str = "") -> bool:
    """Returns True for code of torch, numpy, Python's own library and this package. A user's module
    may have the name of one of these (``trace``, ``token``)."""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root in _OURS or root.startswith("namedtuple_") or file.startswith(_GENERATED)
    file = getattr(sys.modules.get(root), "__file__", None) or _STDLIB
    return file.startswith(_STDLIB) and "site-packages" not in file


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
