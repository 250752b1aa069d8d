"""Switches: on inside ``with`` blocks of this thread or task, and off in all others."""

from __future__ import annotations

from contextvars import ContextVar


class Switch:
    """``with switch: ...``, nested as often as one likes; ``bool(switch)`` says whether it is on.

    It is a context variable. A thread sees that of its maker only where it runs in a copy of the
    context, and threads of autograd do not: what a backward asks for is no Switch.
    """

    def __init__(self, name: str) -> None:
        self._depth: ContextVar[int] = ContextVar(name, default=0)
        self.depth = self._depth.get  # how many blocks are open

    def __bool__(self) -> bool:
        return self._depth.get() > 0

    def __enter__(self) -> None:
        self._depth.set(self._depth.get() + 1)

    def __exit__(self, *exc: object) -> None:
        self._depth.set(self._depth.get() - 1)
