"""Autograd's graph, walked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch


def nodes_of(results: Iterable[torch.Tensor], stop: Collection[Any] = ()) -> set[Any]:
    """The nodes that ``results`` were made by, their own and those of leaves among them. The graph
    is not followed beyond the nodes ``stop``."""
    seen: set[Any] = set()
    edges = map(torch.autograd.graph.get_gradient_edge, (r for r in results if r.requires_grad))
    queue = [edge.node for edge in edges]
    while queue:
        node: Any = queue.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                queue += [n for n, _ in node.next_functions if n is not None]
    return seen
