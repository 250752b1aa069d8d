"""Nodes where calls of autograd start: the roots of each backward, of regular tensors too.

Autograd counts the nodes of each thread separately. One thread makes a whole graph. Threads that
run the forwards of micro-batches have their own count (``number_own_nodes``); all others share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count as counting
from typing import Any

import torch

from disttensor import callbacks
from disttensor.torch_private import current_backward, current_node

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


def mark_starts(roots: Iterable[Any]) -> None:
    """Marks the nodes of ``roots``, tensors or edges of the graph, where autograd starts."""
    for root in roots if callbacks.before_start else ():
        node: Any = root.grad_fn if isinstance(root, torch.Tensor) else root.node
        if node is not None and _KEY not in node.metadata:
            node.metadata[_KEY] = True
            node.register_prehook(_starts)


def wrap_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of torch with which each call of autograd starts."""

    @wraps(original)
    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if current_backward() == -1:  # a call inside of a node is a part of its backward
            mark_starts(roots)
        return original(roots, *args, **kwargs)

    return run_backward


def _starts(grads: Any) -> None:
    node = current_node()
    for function in callbacks.before_start:
        function(node)
