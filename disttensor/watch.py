"""A module and all modules in it, and whether anything of them has changed that its forward could depend on.

Parameters, buffers and hooks are compared whenever somebody asks, which is cheap. Assignments to attributes (``train()`` and
``eval()`` are some) are told by ``nn.Module.__setattr__``, which is wrapped when the first module is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as torch_module

from disttensor.tensor import DistTensor


class Watcher(Protocol):
    def changed(self, name: str) -> None: ...


_watchers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_global_hooks: tuple[Any, ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_wrapped: list[str] = []


class Subtree:
    """What ``module`` and the modules in it were made of when this was made."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self.modules = list(module.modules())
        tables = [t for m in self.modules for t in (m._parameters, m._buffers)]
        self._tables = [t for t in tables if t]
        self._empty = [t for t in tables if not t]
        self._hooks = [*_global_hooks, *(h for m in self.modules[1:] for h in _hooks_of(m))]
        self.hooked = any(self._hooks)
        self.tensors = self._read()
        self._specs = [p._spec for p in self.tensors] if self.elsewhere else []
        self._locals = [p._local for p in self.tensors] if self.elsewhere else []
        self.attached = [  # DistTensors that are attributes, not parameters or buffers
            (m.__dict__, name)
            for m in self.modules
            for name, value in m.__dict__.items()
            if isinstance(value, DistTensor)
        ]
        _wrap()
        for m in self.modules:
            _watchers.setdefault(m, weakref.WeakSet()).add(watcher)

    @property
    def elsewhere(self) -> bool:
        """Are all parameters and buffers on meshes that this rank is not in?"""
        return all(isinstance(p, DistTensor) and not p.is_initialized for p in self.tensors)

    def _read(self) -> list[Any]:
        return [p for t in self._tables for p in t.values() if p is not None]

    def unchanged(self) -> bool:
        if any(self._empty) or any(self._hooks) is not self.hooked:
            return False
        tensors = self._read()
        if len(tensors) != len(self.tensors) or not all(map(is_, tensors, self.tensors)):
            return False
        return not self._specs or (
            all(map(is_, [p._spec for p in tensors], self._specs))
            and all(map(is_, [p._local for p in tensors], self._locals))
        )

    def attributes(self) -> list[int]:
        """What the modules' attributes are, and what lies in those that are lists, dicts and sets: equal while nothing is
        assigned or put there."""
        out: list[int] = []
        for m in self.modules:
            for name, value in m.__dict__.items():
                out += (id(name), id(value))
                if isinstance(value, dict):
                    out += (len(value), *map(id, value), *map(id, value.values()))
                elif isinstance(value, (list, set)):
                    out += (len(value), *map(id, value))
        return out


def _hooks_of(m: nn.Module) -> list[Any]:
    return [m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks]


def _tell(module: Any, name: Any) -> None:
    for watcher in _watchers.get(module, ()):
        watcher.changed(name)


def _wrap() -> None:
    """Once: what assigns to modules tells their watchers."""
    if _wrapped:
        return
    for name in ("__setattr__", "__delattr__", "add_module"):
        _wrapped.append(name)
        setattr(nn.Module, name, _telling(getattr(nn.Module, name)))


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, name: Any, *value: Any, **named: Any) -> Any:
        result = method(self, name, *value, **named)
        if self in _watchers:
            _tell(self, name)
        return result

    wrapper.__name__, wrapper.__qualname__ = method.__name__, method.__qualname__
    wrapper.__doc__, wrapper.__wrapped__ = method.__doc__, method  # type: ignore[attr-defined]
    return wrapper
