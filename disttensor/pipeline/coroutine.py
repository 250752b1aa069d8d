"""A function that can pause: its thread runs only while its owner waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Abandoned(BaseException):
    """Raised inside a paused function whose owner gave up."""


class Coroutine:
    """``resume()`` runs ``fn`` until it calls ``pause()`` or ends; True when it has ended. What it
    raises, resume raises.

    The thread has the context variables, and torch's state per thread, of where this is made.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.result: Any = None
        self.ended = False
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._started = self._given_up = False
        run, state = copy_context().run, _torch_state()
        self._thread = threading.Thread(
            target=lambda: run(self._run, fn, state), name="micro-batch", daemon=True
        )

    def resume(self) -> bool:
        if self._started:
            self._go.release()
        else:
            self._started = True
            self._thread.start()
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
        if self._started and not self.ended:
            self._given_up = True
            self._go.release()
            self._thread.join()

    def _run(self, fn: Callable[[], Any], torch_state: Callable[[], ExitStack]) -> None:
        try:
            with torch_state():
                self.result = fn()
        except Abandoned:
            pass
        except BaseException as error:  # the owner raises it
            self._error = error
        self.ended = True
        self._back.release()


def _torch_state() -> Callable[[], ExitStack]:
    """What torch keeps per thread and not in context variables: enters it in another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    on = [d for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    autocast = [torch.autocast(d, torch.get_autocast_dtype(d)) for d in on]

    def enter() -> ExitStack:
        stack = ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        if torch.get_default_device() != device:
            stack.enter_context(device)
        for context in autocast:
            stack.enter_context(context)
        return stack

    return enter
