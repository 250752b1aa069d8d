"""Work: an operation that was started, and is waited for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """An operation in progress. Do not use the tensors that it was started with before ``wait``.

    ``wait`` returns the result of ``finish``, or raises its error; every other ``wait`` does the
    same, also in another thread. After an interrupt (Ctrl-C) the next ``wait`` waits again.
    ``into``: the tensor that will hold the result, if it exists already; else None.
    """

    __slots__ = ("_done", "_error", "_finish", "_lock", "_result", "into")

    def __init__(
        self, finish: Callable[[], T], done: Callable[[], bool] | None = None, into: T | None = None
    ) -> None:
        self.into, self._lock = into, threading.RLock()
        self._finish: Callable[[], T] | None = finish
        self._done = done  # None: unknown before ``wait``
        self._error: Exception | None = None
        self._result: Any = None

    def done(self) -> bool:
        """Returns True if ``wait`` would return, or raise, at once."""
        return self._finish is None or (self._done is not None and self._done())

    def wait(self) -> T:
        if self._finish is not None:
            with self._lock:
                self._run_finish()
        if self._error is not None:
            raise self._error
        return self._result

    def _run_finish(self) -> None:
        if self._finish is not None:
            try:
                self._result = self._finish()
            except Exception as error:
                self._error = error
            self._finish = None


def finished(result: T) -> Work[T]:
    """Returns a Work that is complete, with this result."""
    work: Work[T] = Work.__new__(Work)
    work._finish = work._done = work._error = work.into = None
    work._result = result
    return work
