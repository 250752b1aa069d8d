"""The part of a micro-batch's graph that the backward of one visit runs.

A later visit may read a value of an earlier visit of this rank: a skip connection, or a weight that
was clamped once. One process runs the node of such a value once, with the sum of all gradients, and
hooks and functions that are not linear depend on this. So a node belongs to the earliest visit
whose results depend on it. The backward of a later visit ends at the edges to nodes of earlier
visits, and passes their gradients on: the backward of the earlier visit starts from them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from disttensor.autograd import token
from disttensor.autograd.split_backward import SplitBackward
from disttensor.tensor.leaf_hooks import hooks_on_leaf
from disttensor.torch_private import AccumulateGrad, run_backward

Tensor = torch.Tensor
Node = Any


class VisitGraph:
    """
    readers  its nodes with edges to nodes of earlier visits, and the numbers of these edges.
    stops    these nodes of earlier visits, and the visits that they belong to.
    ends     the leaves that it reaches, and the readers; empty if there are no readers.
    passed   (edge into this part, its gradient), from the backwards of later visits.
    split    a backward whose second part is deferred.
    """

    def __init__(self) -> None:
        self.readers: dict[Node, list[int]] = {}
        self.stops: dict[Node, int] = {}
        self.ends: list[Node] = []
        self.passed: list[tuple[GradientEdge, Tensor]] = []
        self.split: SplitBackward | None = None

    def stop(self, reader: Node, number: int, node: Node, home: int) -> None:
        """Ends this part at an edge of ``reader`` (None: at a root) to a node of visit ``home``."""
        self.stops[node] = home
        if reader is not None:
            self.readers.setdefault(reader, []).append(number)

    @contextmanager
    def passing(self, visits: Sequence[VisitGraph]) -> Iterator[None]:
        """Passes gradients to earlier visits, while a backward runs the readers in its block."""
        handles = [
            node.register_hook(partial(self._pass, visits, node, numbers))
            for node, numbers in self.readers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.readers, self.stops, self.ends = {}, {}, []

    def _pass(
        self, visits: Sequence[VisitGraph], node: Node, numbers: list[int],
        grads: Sequence[Tensor | None], arrived: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        if all(grad is None for grad in arrived):
            return
        # Of a node of C++, autograd has computed only the gradients that this backward uses.
        found = grads if isinstance(node, BackwardCFunction) else _all_gradients(node, arrived)
        for number in numbers:
            grad, edge = found[number], GradientEdge(*node.next_functions[number])
            if grad is not None:
                visits[self.stops[edge.node]].passed.append((edge, grad))


def divide(visits: Sequence[VisitGraph], roots: Sequence[Sequence[GradientEdge]]) -> None:
    """Gives each node below the ``roots`` of each visit to the earliest visit that reaches it.

    A leaf without hooks adds up the gradients of several visits. It belongs to the earliest one if
    a later one has readers: autograd would run each node between these and the leaf.
    """
    homes: dict[Any, int] = {}  # by node, or by the hooks of a leaf
    for number, (visit, starts) in enumerate(zip(visits, roots, strict=True)):
        leaves: dict[Node, None] = {}
        shared: list[tuple[Node, int, Node, int]] = []
        queue: list[tuple[Node, int, Node]] = [(None, 0, edge.node) for edge in starts]
        while queue:
            reader, i, node = queue.pop()
            is_leaf = type(node) is AccumulateGrad
            hooks = hooks_on_leaf(node.variable) if is_leaf else None
            key = node if hooks is None else hooks
            is_new = key not in homes
            home = homes.setdefault(key, number)
            if home < number:
                if is_leaf and hooks is None:
                    shared.append((reader, i, node, home))
                    continue
                visit.stop(reader, i, node, home)
                if is_leaf and visits[home].ends:
                    visits[home].ends.append(node)  # another tensor of the same hooks
            elif is_leaf:
                leaves[node] = None
            elif is_new:
                edges = enumerate(node.next_functions)
                queue += [(node, j, child) for j, (child, _) in edges if child is not None]
        if visit.readers:
            for edge in shared:
                visit.stop(*edge)
            visit.ends = [*leaves, *visit.readers]


def _all_gradients(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Runs a node in a call of autograd of its own, and returns the gradients of all its inputs."""
    found: list[Tensor | None] = []
    device = next(g.device for g in grads if g is not None)
    leaf = token.leaf(device, torch.float32)

    def run(_: Tensor) -> None:
        out = node(*grads)
        found.extend(out if isinstance(out, tuple) else (out,))

    leaf.register_hook(run)
    run_backward((leaf,), (leaf.detach(),), False, False)
    return found
