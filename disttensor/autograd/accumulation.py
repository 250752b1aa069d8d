"""Which backward this is: the only one of its gradients, or one of several micro-batches that add
up.

Whoever drives the backwards says so here; whoever reduces gradients asks. Contributions may wait
for the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Window(NamedTuple):
    """last: no backward follows before the gradients are read. reduce: what those before it do,
    "scatter" or "none". counted: all backwards are to reach the same parameters."""

    last: bool = True
    reduce: str = "scatter"
    counted: bool = False


EACH_TIME = Window()
_present = [EACH_TIME]


def present() -> Window:
    return _present[-1]


@contextmanager
def window(last: bool) -> Iterator[None]:
    """For backwards of micro-batches in here, of which ``last`` says whether it is the last one."""
    _present.append(Window(last))
    try:
        yield
    finally:
        _present.pop()
