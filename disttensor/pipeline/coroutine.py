"""A function that can pause: its thread runs only while its owner waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from disttensor import callbacks
from disttensor.torch_private import (
    dispatch_modes,
    function_modes,
    has_forward_gradients,
    has_multithreading,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_function_mode,
    push_saved_tensors_hooks,
    set_forward_gradients,
    top_saved_tensors_hooks,
)

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Abandoned(BaseException):
    """Raised inside a paused function that its owner abandons."""


class Coroutine:
    """``resume()`` runs ``fn`` until it calls ``pause()`` or ends, and returns True if it has
    ended. It raises the errors of ``fn``.

    The thread has the context variables, and torch's thread state, of the creation of this object.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.result: Any = None
        self.ended = False
        self._error: BaseException | None = None
        # two semaphores: a SimpleQueue is in C, and threading.Semaphore in Python
        self._go, self._back = SimpleQueue[None](), SimpleQueue[None]()
        self._started = self._given_up = False
        run, state = copy_context().run, _torch_state()
        self._job = lambda: run(self._run, fn, state)

    def resume(self) -> bool:
        if self._started:
            self._go.put(None)
        else:
            self._started = True
            _Worker.carry_out(self._job, self._back)
            del self._job
        self._back.get()
        if self._error is not None:
            raise self._error
        return self.ended

    def pause(self) -> None:
        """Returns control to the owner until it resumes; called by the function."""
        self._back.put(None)
        self._go.get()
        if self._given_up:
            raise Abandoned

    def abandon(self) -> None:
        """Ends a paused function."""
        if self._started and not self.ended:
            self._given_up = True
            self._go.put(None)
            self._back.get()

    def _run(self, fn: Callable[[], Any], torch_state: Callable[[], ExitStack]) -> None:
        try:
            with torch_state():
                self.result = fn()
        except Abandoned:
            pass
        except BaseException as error:  # raised by the owner
            self._error = error
        self.ended = True


class _Worker(threading.Thread):
    """A thread that runs one function after another, so that the memory that libraries keep per
    thread (as workspaces of matrix products) is allocated once."""

    _idle: ClassVar[list[_Worker]] = []
    runs_program = True  # read by disttensor.comm.blocked_wait

    def __init__(self) -> None:
        super().__init__(name="micro-batch", daemon=True)
        self._jobs = SimpleQueue[tuple[Callable[[], None], SimpleQueue[None]]]()

    @classmethod
    def carry_out(cls, job: Callable[[], None], done: SimpleQueue[None]) -> None:
        """Runs ``job``, and puts None into ``done`` when the thread is free for another job."""
        try:
            worker = cls._idle.pop()
        except IndexError:
            worker = cls()
            worker.start()
        worker._jobs.put((job, done))

    def run(self) -> None:
        while True:
            job, done = self._jobs.get()
            job()
            del job
            callbacks.recompute_contexts().clear()  # of modules whose forward was abandoned
            self._idle.append(self)
            done.put(None)


if hasattr(os, "register_at_fork"):  # a forked process has no threads
    os.register_at_fork(after_in_child=_Worker._idle.clear)


def _torch_state() -> Callable[[], ExitStack]:
    """Returns a function that enters the present thread state of torch in another thread. It covers
    state that is not in context variables, except the state of a profiler."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    forward, many_threads = has_forward_gradients(), has_multithreading()
    cached = torch.is_autocast_cache_enabled()
    on = [d for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    autocast = [torch.autocast(d, torch.get_autocast_dtype(d), cache_enabled=cached) for d in on]
    modes, hooks = dispatch_modes(), _saved_tensors_hooks()
    functions = function_modes()  # with the default device
    # of the current device; a new thread has the first device and its default stream
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> ExitStack:
        stack = ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(set_forward_gradients(forward))
        stack.enter_context(torch.autograd.set_multithreading_enabled(many_threads))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        for pack, unpack in hooks:
            stack.enter_context(saved_tensors_hooks(pack, unpack))
        for mode in functions:
            push_function_mode(mode)
            stack.callback(pop_function_mode)
        for context in (*modes, *autocast):
            stack.enter_context(context)
        return stack

    return enter


def _saved_tensors_hooks() -> list[Any]:
    """Returns the pairs of hooks of this thread, the outermost first."""
    pairs: list[Any] = []
    while (pair := top_saved_tensors_hooks(True)) is not None:
        pairs.insert(0, pair)
        pop_saved_tensors_hooks()
    for pair in pairs:
        push_saved_tensors_hooks(*pair)
    return pairs
