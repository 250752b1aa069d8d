"""Work: what was started, and is waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """Something under way. Do not touch the tensors that it was started with before ``wait``.

    ``wait`` gives the result of ``finish``, or raises its error, as often as it is asked. ``into``:
    what that will be, where it is there already, to be filled; None: it is made in the end.
    """

    __slots__ = ("_done", "_error", "_finish", "_result", "into")

    def __init__(
        self, finish: Callable[[], T], done: Callable[[], bool] | None = None, into: T | None = None
    ) -> None:
        self.into = into
        self._finish: Callable[[], T] | None = finish
        self._done = done  # None: nobody can tell before ``wait``
        self._error: Exception | None = None
        self._result: Any = None

    def done(self) -> bool:
        """Would ``wait`` return, or raise, at once?"""
        return self._finish is None or (self._done is not None and self._done())

    def wait(self) -> T:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result = finish()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result


def finished(result: T) -> Work[T]:
    """Work with nothing left to do."""
    work: Work[T] = Work.__new__(Work)
    work._finish = work._done = work._error = work.into = None
    work._result = result
    return work
