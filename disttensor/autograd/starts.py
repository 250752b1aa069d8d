"""Nodes where calls of autograd may start: the roots of a backward, and nodes whose results left
DistTensors as regular tensors (``to_local``), which may become roots.

Autograd counts the nodes of each thread separately. One thread makes a whole graph. Threads that
run the forwards of micro-batches have their own count (``number_own_nodes``); all others share one.
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
# Global and no context variable: hooks read it in autograd's threads, which have no such variables.
_graph_of = [0]


def number_own_nodes() -> None:
    """Gives this thread its own count."""
    _thread.count = next(_counts)


def node_count() -> int:
    """Returns the count that numbers the nodes of this thread."""
    return getattr(_thread, "count", 0)


def graph_count() -> int:
    """Returns the count that numbered the graph of the present backward."""
    return _graph_of[-1]


@contextmanager
def count_of_graphs(count: int) -> Iterator[None]:
    """Sets the count of the graphs of backwards in its block."""
    _graph_of.append(count)
    try:
        yield
    finally:
        _graph_of.pop()


def mark_start(x: torch.Tensor) -> torch.Tensor:
    """Marks ``x`` as a place where autograd may start, or enter the graph of DistTensors."""
    node: Any = x.grad_fn if callbacks.before_start else None
    if node is not None and _KEY not in node.metadata:
        node.metadata[_KEY] = True
        node.register_prehook(_starts)
    return x


def _starts(grads: Any) -> None:
    node = current_node()
    for function in callbacks.before_start:
        function(node)
