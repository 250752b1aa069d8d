"""Work of the engine that the user's modes do not see.

A ``TorchDispatchMode`` or ``TorchFunctionMode`` counts, logs or replays what the program computes;
selective recomputation replays operators by their place in the order. All-gathers and reductions
run at other moments in a recomputation than in its forward. Their operators differ between ranks
where pieces are padded.
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
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

F = TypeVar("F", bound=Callable[..., Any])


def unseen(function: F) -> F:
    """``function``, run outside the user's modes."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not count_dispatch_modes() and not count_function_modes():
            return function(*args, **kwargs)
        with _modes_aside():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextmanager
def _modes_aside() -> Iterator[None]:
    """Modes that say so (``sees_engine``) and torch's own, as of fake tensors, stay."""
    there = [mode for mode in dispatch_modes() if getattr(mode, "_mode_key", None) is None]
    functions = [pop_function_mode() for _ in range(count_function_modes())]
    _exchange(there, [mode for mode in there if getattr(mode, "sees_engine", False)])
    try:
        yield
    finally:
        _exchange([mode for mode in there if getattr(mode, "sees_engine", False)], there)
        for mode in reversed(functions):
            push_function_mode(mode)


def _exchange(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        pop_dispatch_mode(None)
    for mode in new:
        push_dispatch_mode(mode)
