"""Settings: values that user code sets for a ``with`` block, and that calls inside depend on.

``snapshot`` returns them together with the settings of torch that calls depend on: keys of recorded
programs contain it. A setting is a context variable. A thread sees the values of its creator only
if it runs in a copy of the creator's context, and threads of autograd do not: code that runs in a
backward must not read a setting.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import torch

from disttensor.torch_private import autocast_is_on, flags_of_torch

SETTINGS: list[Callable[[], Any]] = []  # current value of each, in the order of registration


class Setting:
    """Base class of settings: ``class rng(Setting, allowed=("invariant", "fast")): ...``.

    ``with rng("fast"):`` sets the value inside the block; blocks nest. ``rng.current()`` returns
    the value, or ``default`` outside all blocks.
    """

    allowed: ClassVar[tuple[Any, ...]]
    current: ClassVar[Callable[[], Any]]
    _variable: ClassVar[ContextVar[Any]]
    _outer: ClassVar[ContextVar[tuple[Any, ...]]]  # values around the blocks of this thread

    def __init_subclass__(cls, allowed: tuple[Any, ...] = (False, True), default: Any = None):
        cls.allowed, cls._variable = allowed, ContextVar(cls.__name__, default=default)
        cls._outer = ContextVar(f"outer {cls.__name__}", default=())
        cls.current = cls._variable.get
        SETTINGS.append(cls.current)

    def __init__(self, policy: Any) -> None:
        if policy not in self.allowed:
            *most, last = map(repr, self.allowed)
            raise ValueError(
                f"{type(self).__name__}({policy!r}): the policies are {', '.join(most)} and {last}"
            )
        self.policy = policy

    def __enter__(self) -> Any:
        self._outer.set((*self._outer.get(), self._variable.get()))
        self._variable.set(self.policy)
        return self

    def __exit__(self, *exc: object) -> None:
        *outer, value = self._outer.get()
        self._outer.set(tuple(outer))
        self._variable.set(value)


class Snapshot(NamedTuple):
    """All settings that may change the results of a call: ``ours`` and torch's."""

    grad: bool
    inference: bool
    dtype: torch.dtype
    deterministic: bool
    autocast: Any
    flags: tuple[Any, ...]
    ours: tuple[Any, ...]


def snapshot(device: str) -> Snapshot:
    """Returns the settings of this thread. ``device``: the type of device that calls run on."""
    autocast = None
    if autocast_is_on():
        autocast = (
            torch.is_autocast_enabled(device), torch.get_autocast_dtype(device),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(),
        )  # fmt: skip
    return Snapshot(
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), autocast, flags_of_torch(device),
        tuple([current() for current in SETTINGS]),
    )  # fmt: skip
