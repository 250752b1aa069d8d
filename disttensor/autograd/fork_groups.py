"""The graph below the roots of a backward, and the groups of weights below its forks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from disttensor.torch_private import node_number

Tensor = torch.Tensor
Node = Any


class BackwardGraph:
    """The nodes below ``roots`` that lead to a leaf or to one of ``anchors``, up to ``stops``.

    children    of each node: the children that lead there
    order       all nodes, children before parents
    input_path  the nodes that lead to an anchor; if there is none, those that lead to ``ends``.
                An end is a node with several chains of nodes below it, each to one leaf, or the top
                of one chain that is used several times: a node of the first layer, or of a weight
                that is computed from others
    leaves      the nodes that accumulate the gradients of leaves, without anchors
    """

    def __init__(
        self, roots: Sequence[Node], anchors: Sequence[Node], stops: Collection[Node] = ()
    ) -> None:
        of_anchors = set(anchors)
        self.children, self.order = _nodes_to_leaves(roots, of_anchors, stops)
        found = self.children
        self.leaves = [n for n in self.order if not found[n] and n not in of_anchors]
        self.anchors = [anchor for anchor in anchors if anchor in found]
        self.ends: list[Node] = [] if self.anchors else self._ends()
        self.input_path = {*self.anchors, *self.ends}
        input_path = self.input_path
        for node in self.order:
            if not input_path.isdisjoint(found[node]):
                input_path.add(node)

    def _ends(self) -> list[Node]:
        chains: set[Node] = set()
        found = []
        uses = Counter(child for below in self.children.values() for child in below)
        for node in self.order:
            below = self.children[node]
            if chains.issuperset(below):
                if len(below) > 1 or (below and uses[node] > 1):
                    found.append(node)
                else:
                    chains.add(node)
        return found


class ParamGroup:
    """Weights whose gradients are computed together: connected nodes off the input path.

    starts  forks and ends above them; empty if only roots are above them
    handed  (fork, node) for a fork that hands its gradient on to a node of the group. The group
            does not need to run such a fork again
    nodes   the nodes off the input path, including ``leaves``
    """

    def __init__(self) -> None:
        self.starts: list[Node] = []
        self.handed: list[tuple[Node, Node]] = []
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self.from_roots = False
        self.roots: list[Any] = []
        self.grads: list[Tensor] = []

    def forget(self) -> None:
        self.starts, self.handed, self.nodes = [], [], []

    @property
    def forks(self) -> list[Node]:
        return [*self.starts, *(fork for fork, _ in self.handed)]

    def begin(
        self, roots: Sequence[Any], edges: Sequence[Node], grads: Sequence[Tensor],
        fork_grads: dict[Node, tuple[Tensor | None, ...]],
    ) -> None:  # fmt: skip
        """Keeps the roots and gradients of the second part."""
        if self.from_roots:
            inside = set(self.nodes)
            at = [i for i, edge in enumerate(edges) if edge in inside]
            self.roots, self.grads = [roots[i] for i in at], [grads[i] for i in at]
        for fork in self.starts:
            for i, grad in enumerate(fork_grads.get(fork, ())):
                if grad is not None:
                    self.roots.append(GradientEdge(fork, i))
                    self.grads.append(grad)
        for fork, node in self.handed:
            for grad in fork_grads.get(fork, ()):
                if grad is not None:
                    self.roots.append(GradientEdge(node, 0))
                    self.grads.append(grad)

    @property
    def second(self) -> list[Node]:
        """The nodes that the second part runs."""
        return [*self.starts, *self.nodes]


def groups_of(graph: BackwardGraph, roots: Sequence[Node]) -> list[ParamGroup]:
    """Returns the groups, by their newest fork, newest first. A group may have several forks."""
    parent: dict[Node, Node] = {}

    def root_of(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = node = parent[parent[node]]
        return node

    input_path = graph.input_path
    off = []
    forks = []
    for node in graph.order:
        if node in input_path:
            below = [child for child in graph.children[node] if child not in input_path]
            if not below:
                continue
            forks.append((node, below))
            together = below
        else:
            off.append(node)
            together = [node, *graph.children[node]]
        for child in together[1:]:
            parent[root_of(child)] = root_of(together[0])
    found: dict[Node, ParamGroup] = {}
    for node in off:
        found.setdefault(root_of(node), ParamGroup()).nodes.append(node)
    leaves = set(graph.leaves)
    for group in found.values():
        group.leaves = [node for node in group.nodes if node in leaves]
    for fork, below in forks:
        group = found[root_of(below[0])]
        if below == [_receiver_of(fork)]:
            group.handed.append((fork, below[0]))
        else:
            group.starts.append(fork)
    for node in roots:
        if node in graph.children and node not in graph.input_path:
            found[root_of(node)].from_roots = True

    def newest(group: ParamGroup) -> float:
        return math.inf if group.from_roots else max(map(node_number, group.forks))

    return sorted(found.values(), key=newest, reverse=True)


def _receiver_of(node: Node) -> Node | None:
    """Returns the child that gets the gradient of ``node`` unchanged, or None. A custom function
    names this argument in ``hands_on``."""
    number = getattr(getattr(node, "_forward_cls", None), "hands_on", None)
    return None if number is None else node.next_functions[number][0]


def _nodes_to_leaves(
    roots: Sequence[Node], anchors: Collection[Node], stops: Collection[Node]
) -> tuple[dict[Node, list[Node]], list[Node]]:
    """Returns the reachable nodes that lead to a leaf or to one of ``anchors``, each with its
    children that do, and the nodes in order, children before parents. ``stops`` are not
    reached."""
    children: dict[Node, list[Node]] = {}
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, list[Node], int]] = []

    def enter(node: Node) -> None:
        seen.add(node)
        below = [n for n, _ in node.next_functions if n is not None and n not in stops]
        stack.append((node, below, 0))

    for root in roots:
        if root not in seen:
            enter(root)
        while stack:
            node, below, at = stack.pop()
            while at < len(below) and below[at] in seen:
                at += 1
            if at < len(below):
                stack.append((node, below, at + 1))
                enter(below[at])
                continue
            needed = [child for child in dict.fromkeys(below) if child in children]
            if needed or node in anchors or hasattr(node, "variable"):
                children[node] = needed
                order.append(node)
    return children, order
