"""Callbacks: functions that lower packages call and that higher packages register.

Imports point down; a callback is the one way in which a package calls another one above it. All of
them stand here, with the package that calls them and the packages that register.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

Contexts = Callable[[], AbstractContextManager[None]]


@contextmanager
def set_during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a context variable inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# autograd -> fsdp. Called with a node before it runs, if a backward may start at it or enters the
# graph of DistTensors there.
before_start: list[Callable[[Any], None]] = []

# tensor -> fsdp. Called after the outermost backward has raised an error.
after_backward_error: list[Callable[[], None]] = []

# tensor -> fsdp. Called with parameters before their gradients are read or reduced.
before_grad_read: list[Callable[[list[Any]], None]] = []

_thread = threading.local()


def recompute_contexts() -> dict[Hashable, Contexts]:
    """patches -> fsdp, pipeline, graphs. Returns the contexts to enter around the recomputation of
    a checkpointed region, by their owners: those that this thread has registered when the forward
    of the region runs. A thread of one rank alone may run a region of its own meanwhile."""
    found: dict[Hashable, Contexts] = _thread.__dict__.setdefault("recompute_contexts", {})
    return found


# patches -> simulate. The same (a ``Contexts`` or None), for one coroutine: the context that this
# code is in.
recompute_context: ContextVar[Any] = ContextVar("recompute context", default=None)

# comm -> pipeline. Called before this rank waits for metadata: a tensor that it does not hold.
before_metadata_receive: ContextVar[Callable[[], None]] = ContextVar(
    "before_metadata_receive", default=lambda: None
)

# pipeline -> simulate. Called with the actions of this rank's stage. Returns those to carry out: a
# micro-batch without actions gets the loss of the first one.
choose_actions: ContextVar[Callable[[Any], Any]] = ContextVar(
    "choose_actions", default=lambda row: row
)

# observe -> dispatch. Called after an observer was opened or closed.
on_observers: list[Callable[[], None]] = []

# comm.failure_watch -> comm. ``fn(watcher, text)`` is called once, in the watcher's thread, with
# the text posted in the store under a key. If it returns False it is called a second later again.
on_report: dict[str, Callable[[Any, str], bool]] = {}

# comm.failure_watch -> comm. ``fn(watcher)`` is called every second in the watcher's thread.
on_heartbeat: list[Callable[[Any], None]] = []
