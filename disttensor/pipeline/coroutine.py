"""A function that can pause: it runs in a thread of its own, and only while its owner waits for
it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Abandoned(BaseException):
    """Raised inside a paused function whose owner gave up."""


class Worker:
    """``resume()`` runs ``fn`` until it calls ``pause()`` or ends; True when it has ended. What it
    raises, resume raises.

    The thread computes with gradients and autocast as they are where the Worker is made.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.result: Any = None
        self.ended = False
        self._fn = fn
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._given_up = False
        self._state = _state()

    def resume(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="micro-batch", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self.ended

    def pause(self) -> None:
        """Called by the function: hand over to the owner, and go on when it resumes."""
        self._back.release()
        self._go.acquire()
        if self._given_up:
            raise Abandoned

    def abandon(self) -> None:
        """End a function that is paused."""
        if self._thread is not None and not self.ended:
            self._given_up = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.set_grad_enabled(self._state[0]):
                self.result = _under(self._state[1], self._fn)
        except Abandoned:
            pass
        except BaseException as error:  # the owner raises it
            self._error = error
        self.ended = True
        self._back.release()


def _state() -> tuple[bool, list[tuple[str, torch.dtype]]]:
    """What torch keeps per thread: are gradients on, and the autocast of each device."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    on = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]
    return torch.is_grad_enabled(), on


def _under(casts: list[tuple[str, torch.dtype]], fn: Callable[[], Any]) -> Any:
    if not casts:
        return fn()
    device, dtype = casts[0]
    with torch.autocast(device, dtype):
        return _under(casts[1:], fn)
