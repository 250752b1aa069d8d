"""Where calls of autograd start: at the roots of a backward, and at nodes whose results left the
world of DistTensors as plain tensors (``to_local``), which may be roots later.

Autograd counts the nodes of each thread apart. A graph is made by one thread, and those that run
the forwards of micro-batches have a count of their own (``own_count``); all others share one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as counting
from typing import Any

import torch

from disttensor import callbacks
from disttensor.torch_private import current_node

_KEY = "disttensor.start"
_thread = threading.local()
_counts = counting(1)
# Of the process, and no context variable: hooks ask in the threads of autograd, which see none.
_graph_of = [0]


def own_count() -> None:
    """This thread makes graphs of its own."""
    _thread.count = next(_counts)


def node_count() -> int:
    """The count that numbers the nodes of this thread."""
    found: int = getattr(_thread, "count", 0)
    return found


def graph_count() -> int:
    """The count that numbered the graph of the backward that runs."""
    return _graph_of[-1]


@contextmanager
def graph_of(count: int) -> Iterator[None]:
    """Backwards in here are of graphs that ``count`` numbered."""
    _graph_of.append(count)
    try:
        yield
    finally:
        _graph_of.pop()


def may_start(x: torch.Tensor) -> torch.Tensor:
    """A call of autograd may start at ``x``, or enter the graph of DistTensors there."""
    node: Any = x.grad_fn if callbacks.before_start else None
    if node is not None and _KEY not in node.metadata:
        node.metadata[_KEY] = True
        node.register_prehook(_starts)
    return x


def _starts(grads: Any) -> None:
    node = current_node()
    for function in callbacks.before_start:
        function(node)
