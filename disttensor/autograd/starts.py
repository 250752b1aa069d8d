"""Nodes where calls of autograd start: the roots of each backward, of regular tensors too.

Autograd numbers the nodes of each thread separately, so a number says nothing without its thread.
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


def node_count() -> int:
    """Returns the number of the count that numbers the nodes of this thread; 0 is no thread's."""
    try:
        return _thread.count
    except AttributeError:
        _thread.count = next(_counts)
        return _thread.count


@contextmanager
def count_of_graphs(count: int) -> Iterator[None]:
    """Sets the count of the graphs of the calls of autograd in its block, which may be another
    thread's."""
    before, _thread.graphs = getattr(_thread, "graphs", None), count
    try:
        yield
    finally:
        _thread.graphs = before


def graph_count(start: Any) -> tuple[int, bool]:
    """Returns the count of the thread that started the call of autograd at the node ``start``, and
    whether it is known to number the whole graph (``count_of_graphs``)."""
    return start.metadata[_KEY]


def mark_starts(roots: Iterable[Any]) -> None:
    """Marks the nodes of ``roots``, tensors or edges of the graph, where autograd starts."""
    known = getattr(_thread, "graphs", None)
    for root in roots if callbacks.before_start else ():
        node: Any = root.grad_fn if isinstance(root, torch.Tensor) else root.node
        if node is not None:
            if _KEY not in node.metadata:
                node.register_prehook(_starts)
            node.metadata[_KEY] = known or node_count(), known is not None


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
