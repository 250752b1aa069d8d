"""Which backward code runs in. Several calls of autograd may count as one: those who follow
backwards see one, whose end is that of the last call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from disttensor.torch_private import after_backward, current_backward

_numbers = count(-2, -1)  # below those of torch, which count up from 0, and -1: none
# Of the process, and no context variable: hooks ask in the threads of autograd, which see none.
_joined: list[tuple[int, list[Callable[[], object]]]] = []


def this_backward() -> int:
    """The number of the backward that this code runs in; -1 outside."""
    return _joined[-1][0] if _joined and current_backward() != -1 else current_backward()


def when_over(function: Callable[[], object]) -> None:
    """Run a function when the present backward has run all its nodes."""
    if _joined:
        _joined[-1][1].append(function)
    else:
        after_backward(function)


class _OnFailure:
    """Put beside what runs at the end of a call of autograd, which drops it where there was an
    error, before that is raised in Python."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function, self.is_over = function, False

    def __call__(self) -> None:
        self.is_over = True

    def __del__(self) -> None:
        if not self.is_over:
            self.function()


def when_failed(function: Callable[[], object]) -> None:
    """Run a function where the present call of autograd ends with an error."""
    after_backward(_OnFailure(function))


@contextmanager
def one_backward() -> Iterator[None]:
    """The calls of autograd in here are one backward. What waits for its end runs there, unless
    there was an error."""
    waiting: list[Callable[[], object]] = []
    _joined.append((next(_numbers), waiting))
    try:
        yield
        while waiting:
            waiting.pop(0)()
    finally:
        _joined.pop()


@contextmanager
def part_of_present() -> Iterator[None]:
    """A call of autograd in a node of a backward is part of that backward, which ends later."""
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
            when_over(function)
