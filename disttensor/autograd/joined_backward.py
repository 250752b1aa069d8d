"""Identifies the backward that code runs in. Several calls of autograd may count as one backward,
which ends with the last call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from disttensor.torch_private import after_backward, current_backward

_numbers = count(-2, -1)  # torch's count up from 0, and -1 is no backward
# Global and no context variable: hooks read it in autograd's threads, which have no such variables.
_joined: list[tuple[int, list[Callable[[], object]]]] = []


def this_backward() -> int:
    """Returns the number of the backward that this code runs in; -1 outside."""
    return _joined[-1][0] if _joined and current_backward() != -1 else current_backward()


def run_after_backward(function: Callable[[], object]) -> None:
    """Runs a function when the present backward has run all its nodes."""
    if _joined:
        _joined[-1][1].append(function)
    else:
        after_backward(function)


def run_last(function: Callable[[], object]) -> None:
    """Runs a function after those that were registered until the end of the present backward."""
    run_after_backward(lambda: run_after_backward(function))


class _OnFailure:
    """A callback at the end of a call of autograd. After an error autograd drops it without a call,
    before Python raises the error."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function, self.is_over = function, False

    def __call__(self) -> None:
        self.is_over = True

    def __del__(self) -> None:
        if not self.is_over:
            self.function()


def run_after_failure(function: Callable[[], object]) -> None:
    """Runs a function if the present call of autograd ends with an error."""
    after_backward(_OnFailure(function))


@contextmanager
def one_backward() -> Iterator[None]:
    """Makes the calls of autograd in its block one backward. Functions registered for its end run
    there, unless there was an error."""
    waiting: list[Callable[[], object]] = []
    _joined.append((next(_numbers), waiting))
    try:
        yield
        while waiting:
            waiting.pop(0)()
    finally:
        _joined.pop()


@contextmanager
def join_present_backward() -> Iterator[None]:
    """Makes a call of autograd inside a node part of the present backward, which ends later."""
    if current_backward() == -1:
        yield
        return
    waiting: list[Callable[[], object]] = []
    _joined.append((this_backward(), waiting))
    try:
        yield
    finally:
        _joined.pop()
        for function in waiting:
            run_after_backward(function)
