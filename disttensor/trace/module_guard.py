"""ModuleGuard: a module and all modules in it, and whether anything has changed that the forward
may depend on.

Mutating methods notify the guard, so that checking it costs nothing. The first guarded module wraps
the methods of ``nn.Module`` that assign attributes (as ``train()`` and ``eval()`` do) or register
hooks. The tables of parameters, buffers and children of a guarded module notify its guard too, and
``token.replacements`` counts changes of the tensors themselves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import nn

from disttensor.autograd import token
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import global_module_hooks

_guarded: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ModuleGuard]]
_guarded = weakref.WeakKeyDictionary()
_NOTIFYING = (
    "__setattr__", "__delattr__", "add_module", "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_wrapped: dict[str, tuple[Any, Any]] = {}  # name -> (the method of torch, its wrapper)
_allowed = [False]  # set by disttensor.patches: may methods of torch be wrapped?


class ModuleGuard:
    """The state of ``module`` and the modules in it at creation. ``changes``: the number of
    assignments to attributes since."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.changes, self._stale = 0, False
        self._flags: tuple[bool, ...] | None = None
        wrap_methods()
        for m in self.modules:
            if m not in _guarded:
                _guarded[m] = weakref.WeakSet()
            for name in ("_parameters", "_buffers", "_modules"):
                if type(m.__dict__[name]) is not _Table:  # a user may have put another dict
                    m.__dict__[name] = _Table.of(m, m.__dict__[name])
            _guarded[m].add(self)
        self._hooks = [*global_module_hooks, *(h for m in self.modules[1:] for h in _hooks_of(m))]
        self.hooked = _any(self._hooks)
        tables = [t for m in self.modules for t in (m._parameters, m._buffers)]
        self.tensors: list[Any] = [p for t in tables for p in t.values() if p is not None]
        self._remade = token.replacements[0]
        self.elsewhere = are_elsewhere(self.tensors)
        self._specs = [p.spec for p in self.tensors] if self.elsewhere else []
        self._locals = [p.local for p in self.tensors] if self.elsewhere else []
        self.attached = [  # DistTensors that are attributes, not parameters or buffers
            (m.__dict__, name)
            for m in self.modules
            for name, value in m.__dict__.items()
            if isinstance(value, DistTensor)
        ]

    def changed(self, name: str) -> None:
        """Records an assignment to an attribute of the module or of a module in it."""
        self.changes += 1
        self._flags = None
        self._stale = self._stale or name != "training"

    def flags(self) -> tuple[bool, ...]:
        """Returns ``training`` of each module, which may change."""
        if self._flags is None:
            self._flags = tuple([m.training for m in self.modules])
        return self._flags

    def unchanged(self) -> bool:
        """Returns True if attributes, hooks and tensors are unchanged, except for ``flags``."""
        if self._stale:
            return False
        if self.hooked:
            return _any(self._hooks)
        return not any(global_module_hooks) and (
            self._remade == token.replacements[0] or self._tensors_unchanged()
        )

    def _tensors_unchanged(self) -> bool:
        self._remade = token.replacements[0]
        return all(map(is_, [p.spec for p in self.tensors], self._specs)) and all(
            map(is_, [p.local for p in self.tensors], self._locals)
        )

    def attributes(self) -> list[int]:
        """Returns the ids of the modules' attributes and of the contents of lists, dicts and sets
        among them: equal while nothing is assigned to them or put into them."""
        out: list[int] = []
        for m in self.modules:
            for name, value in m.__dict__.items():
                out += (id(name), id(value))
                if isinstance(value, dict):
                    out += (len(value), *map(id, value), *map(id, value.values()))
                elif isinstance(value, (list, set)):
                    out += (len(value), *map(id, value))
        return out


def are_elsewhere(tensors: Sequence[Any]) -> bool:
    """Returns True if this rank is off the meshes of all ``tensors``."""
    return all(isinstance(t, DistTensor) and not t.is_initialized for t in tensors)


def _hooks_of(m: nn.Module) -> list[Any]:
    return [m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks]


def has_hooks(m: nn.Module) -> bool:
    """Returns True if ``m`` itself has hooks that must run in each call."""
    return _any(_hooks_of(m))


def _any(tables: list[Any]) -> bool:
    """Returns True if a hook must run in each call, unlike hooks with ``harmless``."""
    return any(not getattr(hook, "harmless", False) for t in tables for hook in t.values())


def _notify_guards(module: Any, name: Any) -> None:
    for guard in _guarded.get(module, ()):
        guard.changed(name)


class _Table(dict[str, Any]):
    """The parameters, buffers or children of a guarded module. Copied and pickled as a dict."""

    owner: weakref.ref[nn.Module]

    @classmethod
    def of(cls, owner: nn.Module, table: dict[str, Any]) -> _Table:
        new = cls(table)
        new.owner = weakref.ref(owner)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)


def _changing(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def change(self: _Table, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        owner = self.owner()
        if owner is not None:
            _notify_guards(owner, name)
        return result

    return change


for _name in (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
):  # fmt: skip
    setattr(_Table, _name, _changing(_name))


def wrap_methods() -> None:
    """Wraps the methods that change modules, once, so that they notify guards."""
    if _wrapped or not _allowed[0]:
        return
    for name in _NOTIFYING:
        method = getattr(nn.Module, name)
        _wrapped[name] = method, _notifying(method)
        setattr(nn.Module, name, _wrapped[name][1])


def allow() -> None:
    """Allows wrapping methods of ``nn.Module``, from the first guarded module on."""
    _allowed[0] = True
    if _guarded:
        wrap_methods()


def unwrap_methods() -> None:
    """Restores the methods of ``nn.Module``, unless they were wrapped again since."""
    _allowed[0] = False
    for name, (method, wrapper) in _wrapped.items():
        if getattr(nn.Module, name) is wrapper:
            setattr(nn.Module, name, method)
    _wrapped.clear()


def _notifying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if self in _guarded:
            _notify_guards(self, args[0] if args else "")
        return result

    return wrapper
