"""Walks autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


def node_of(x: torch.Tensor) -> Any:
    """Returns the node that made ``x``, which requires grad, or the gradient accumulator of a leaf.
    Callers must keep x alive: for a Python node torch's ``get_gradient_edge`` makes a view, to hold
    the graph; here x holds it."""
    node = x.grad_fn
    return get_gradient_edge(x).node if node is None else node


def nodes_of(
    results: Iterable[torch.Tensor | GradientEdge], stop: Collection[Any] = ()
) -> set[Any]:
    """Returns the nodes from which ``results``, tensors or edges of the graph, were made, including
    their own nodes and leaves. The walk does not go beyond the nodes ``stop``."""
    seen: set[Any] = set()
    queue: list[Any] = []
    for x in results:
        if isinstance(x, GradientEdge):
            queue.append(x.node)
        elif x.requires_grad:
            queue.append(node_of(x))
    while queue:
        node: Any = queue.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                queue += [n for n, _ in node.next_functions if n is not None]
    return seen
