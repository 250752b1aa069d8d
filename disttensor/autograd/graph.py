"""Autograd's graph, walked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def node_of(x: torch.Tensor) -> Any:
    """The node that made ``x``, which requires grad; of a leaf the one that takes its gradient.
    Whoever follows it keeps x: for a node of Python torch's ``get_gradient_edge`` makes a view, to
    hold the graph that x holds here."""
    node = x.grad_fn
    return get_gradient_edge(x).node if node is None else node


def nodes_of(results: Iterable[torch.Tensor], stop: Collection[Any] = ()) -> set[Any]:
    """The nodes that ``results`` were made by, their own and those of leaves among them. The graph
    is not followed beyond the nodes ``stop``."""
    seen: set[Any] = set()
    queue = [node_of(x) for x in results if x.requires_grad]
    while queue:
        node: Any = queue.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                queue += [n for n, _ in node.next_functions if n is not None]
    return seen
