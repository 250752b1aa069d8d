"""Hides the engine's operators from the user's modes.

A ``TorchDispatchMode`` or ``TorchFunctionMode`` counts, logs or replays the operators of a program;
selective recomputation replays operators by their position. All-gathers and reductions run at other
times in a recomputation than in its forward, and their operators differ between ranks if pieces are
padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from disttensor.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    outside_function_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)

F = TypeVar("F", bound=Callable[..., Any])


def outside_user_modes(function: F) -> F:
    """Returns ``function``, run outside the user's modes."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not count_dispatch_modes() and not count_function_modes():
            return function(*args, **kwargs)
        with _remove_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextmanager
def _remove_modes() -> Iterator[None]:
    """Removes the user's modes, except modes with ``sees_engine`` and torch's (fake tensors)."""
    there = [mode for mode in dispatch_modes() if getattr(mode, "_mode_key", None) is None]
    seeing = [mode for mode in there if getattr(mode, "sees_engine", False)]
    with outside_function_modes():
        _exchange(there, seeing)
        try:
            yield
        finally:
            _exchange(seeing, there)


def _exchange(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        pop_dispatch_mode(None)
    for mode in new:
        push_dispatch_mode(mode)
