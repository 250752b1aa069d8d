"""The seam for observers: the one place where other code watches the engine.

The engine calls a method of each open Observer for each event. An observer never changes values; it
may run a local function in another way (``run_local``), with the same results. While there is no
observer, an event costs one test of an empty list.

``with observer:`` opens an observer. It sees the calls of the thread that opened it, except that
communication, gradients and modules are seen on all threads, because a backward runs in threads of
autograd. Tracers of torch are not observers, because they return the results of calls: see
``disttensor.patches.tracers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Self

from disttensor import callbacks

Function = Callable[..., Any]


class Observer:
    """Base class of observers: a subclass overrides the events that it needs.

    sees_calls: it needs the events of calls, so calls run in Python instead of C, and each reshard
    is finished before the next call. sees_modules: forwards recorded by ``replay`` run call by
    call.
    """

    sees_calls: ClassVar[bool] = False
    sees_modules: ClassVar[bool] = False
    thread = 0  # the thread that opened it

    def __enter__(self) -> Self:
        self.thread = get_ident()
        observers.append(self)
        _call_callbacks()
        return self

    def __exit__(self, *exc: object) -> None:
        observers.remove(self)
        _call_callbacks()

    # Calls, on the thread of the observer ---------------------------------------------------------

    def begin_call(self, planned: Any) -> None:
        """Sees a call of a DistTensor: its plan, before it runs."""

    def run_local(self, local: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the local function of a plan, and returns its result."""
        return local(*args, **kwargs)

    def run_step(self, step: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a reshard of a local, a collective of a local function, or a custom autograd
        function of regular tensors, and returns its result."""
        return step(*args, **kwargs)

    def read_local(self, read: Function, /, x: Any, axes: tuple[int, ...]) -> Any:
        """Reads the local of ``x`` for a use that varies over ``axes``, by ``read(x, axes)``."""
        return read(x, axes)

    def write(self, x: Any, tracked: bool) -> None:
        """Sees a write to the DistTensor ``x``. ``tracked``: autograd has counted it."""

    def compare_read(self) -> None:
        """Sees that the ranks compare what they read, before the message."""

    def exchange_objects(self) -> None:
        """Sees that ranks exchange Python objects."""

    def exchange_own(self, value: Any) -> None:
        """Sees a value that may differ between ranks, in a world whose other ranks do not run."""

    def seed(self) -> None:
        """Sees that the engine has seeded, or restored, torch's generators."""

    # Pipelines, on the thread of the observer -----------------------------------------------------

    def begin_run(self, order: Sequence[Any], schedule: Any, stage: int) -> None:
        """Sees the meshes and the schedule of a ``pipeline.run``, and the stage of this rank."""

    def begin_action(self, action: Any) -> None:
        """Sees that an action (``pipeline.Action``) begins."""

    def end_action(self, event: Any) -> None:
        """Sees an action, or a wait for a message, that has ended (``pipeline.Event``)."""

    def end_run(self) -> None:
        """Sees that a ``pipeline.run`` has ended, also by an error."""

    # On all threads -------------------------------------------------------------------------------

    def communicate(self, record: Any) -> None:
        """Sees a collective or a message of this rank (``CommRecord``)."""

    def transfer(self, label: object, sources: Sequence[int]) -> None:
        """Sees that this rank posts messages of a transfer. ``label``: its plan, or a description;
        ``sources``: the ranks that the messages come from."""

    def trace_module(self, mesh: Any, calls: Sequence[Any]) -> None:
        """Sees that a module on ``mesh``, which this rank is not in, was traced: each call of the
        module makes these ``calls``."""

    def accumulate_grad(self, params: Sequence[Any]) -> None:
        """Sees that a gradient arrived in a segment with these sharded parameters."""


observers: list[Observer] = []  # the open ones, of all threads


def _call_callbacks() -> None:
    for call in callbacks.on_observers:
        call()


@contextmanager
def hide_observers() -> Iterator[None]:
    """Hides the block from the open observers: its ranks and messages are simulated."""
    before = observers[:]
    observers.clear()
    _call_callbacks()
    try:
        yield
    finally:
        observers[:0] = before
        _call_callbacks()


def observers_of_thread() -> list[Observer]:
    """Returns the observers that this thread opened."""
    me = get_ident()
    return [o for o in observers if o.thread == me]


def seeing_calls() -> list[Observer]:
    """Returns the observers of this thread that see calls."""
    return [o for o in observers_of_thread() if o.sees_calls] if observers else []


def begin_call(planned: Any) -> None:
    """Shows a planned call to the observers."""
    for o in seeing_calls():
        o.begin_call(planned)


def run_local(local: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the local function of a plan."""
    for o in seeing_calls():
        local = partial(o.run_local, local)
    return local(*args, **kwargs)


def run_step(step: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a reshard of a local, a collective of a local function, or a custom autograd function of
    regular tensors."""
    for o in seeing_calls():
        step = partial(o.run_step, step)
    return step(*args, **kwargs)


def read_local(read: Function, x: Any, axes: tuple[int, ...]) -> Any:
    """Reads the local of ``x`` for a use that varies over ``axes``."""
    for o in seeing_calls():
        read = partial(o.read_local, read)
    return read(x, axes)
