"""Prepares functions that torch wrote in Python, so that their inner calls are dispatched."""

from __future__ import annotations

import types
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

from disttensor.cache import Cache

Function = Callable[..., Any]

_bodies: Cache[Function, Function] = Cache(1024, lasting=True)  # of torch's own functions


def _never(*_: Any) -> bool:
    return False


class _Seen:
    """A module as such a body sees it: some names are replaced."""

    def __init__(self, module: Any, **other: Any) -> None:
        self.__dict__.update(other, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_CHECKS = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
)
_TORCH = _Seen(torch, overrides=_Seen(torch.overrides, **_CHECKS))


def body_of(func: Function) -> Function | None:
    """Returns a copy of a function that torch wrote in Python whose own dispatch checks return
    False: its inner calls are then dispatched one by one. None for functions of C++."""
    made = _bodies.get(func)
    if made is not None:
        return made
    inner = unwrap(func)
    if not isinstance(inner, types.FunctionType) or inner.__module__.split(".")[0] != "torch":
        return None
    scope = {**inner.__globals__, **_CHECKS}
    if scope.get("torch") is torch:
        scope["torch"] = _TORCH
    made = types.FunctionType(
        inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    _bodies[func] = made
    return made
