"""A backward in two parts: the gradients of what arrived, and later those of the weights.

Nodes of the graph are of two kinds: those that lead to something that arrived (or, where nothing
did, to the first layer), the *way*, and those that lead to weights only. The first part runs the
way. A node of it from which weights branch off, a *fork*, is run twice, each time for the gradients
of that part alone: the matrix products of a layer's input and of its weight are one node of
autograd. The gradient that came into a fork is kept for the second part, and what the other nodes
had saved is dropped.

A weight is done in the first part where the second would need more than one fork's gradient: it is
used several times in the graph, by a node of Python that gives other gradients too, in a region
that is computed again, or the caller says so (``at_once``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from disttensor.autograd import token
from disttensor.autograd.fork_groups import Graph, Group, groups_of
from disttensor.autograd.graph import node_of

Tensor = torch.Tensor
_AT_ONCE = "disttensor_gradient_at_once"
_HOOKED = "disttensor.hooked"
_REENTRANT = "CheckpointFunctionBackward"  # it refuses to run for some leaves only
Engine = Callable[..., None]
AtOnce = tuple[list[Tensor], str]  # weights whose gradients are made in the first part, and why
REGION = (
    "computed again in the backward, which is done once: leave recompute (checkpoint) out where "
    "gradients are to be put off"
)


def at_once(leaf: Tensor) -> None:
    """The gradient of this leaf is never put off."""
    setattr(leaf, _AT_ONCE, True)


def watched(node: Any) -> None:
    """Hooks are called when this node runs: it runs once in a backward."""
    if node is not None:
        node.metadata[_HOOKED] = True


class SplitBackward:
    """The backward of ``roots`` with these gradients.

    whole(node)  why its part of the graph cannot be split; empty where it can
    own(node)    no other graph has it, so what it saved may be dropped
    engine       ``torch.autograd.backward``, or what calls it

    ``is_whole``: nothing is left for ``weights``. ``at_once``: the weights not left for it.
    """

    def __init__(
        self, roots: Sequence[Tensor], grads: Sequence[Tensor], *,
        whole: Callable[[Any], str], own: Callable[[Any], bool], engine: Engine,
    ) -> None:  # fmt: skip
        self.engine, self.own = engine, own
        self.roots, self.grads = list(roots), list(grads)
        self.edges = [node_of(root) for root in roots]
        anchors = [node_of(anchor) for anchor in token.anchors()]
        self.graph = Graph(self.edges, anchors)
        apart = any(node.name() == _REENTRANT for node in self.graph.order)
        self.groups: list[Group] = []
        self.at_once: list[AtOnce] = []
        for group in groups_of(self.graph, self.edges):
            why = REGION if apart else _why_whole(group, whole)
            if why:
                self.at_once.append(([leaf.variable for leaf in group.leaves], why))
            else:
                self.groups.append(group)
        self.is_whole = not self.groups

    def inputs(self, retain_graph: bool) -> None:
        """The first part; ``retain_graph``: as for a backward, where it is the only one."""
        graph, groups, roots, grads = self.graph, self.groups, self.roots, self.grads
        if self.is_whole:
            self.engine(roots, grads, retain_graph)
        else:
            came = self._run_way()
            for group in groups:
                group.begin(roots, self.edges, grads, came)
        later = {node for group in groups for node in group.second}
        for node in graph.order if groups else ():
            if node not in later and self.own(node):
                drop_saved(node)
        for group in groups:
            group.forget()
        self.roots, self.grads, self.edges = [], [], []
        del self.graph  # as far as the groups do not hold it

    def _run_way(self) -> dict[Any, Any]:
        """What came into the forks."""
        graph = self.graph
        came: dict[Any, Any] = {}
        put_off = {leaf for group in self.groups for leaf in group.leaves}
        forks = [fork for group in self.groups for fork in group.forks]
        to = [leaf for leaf in graph.leaves if leaf not in put_off] + graph.anchors
        to += [end for end in graph.ends if end in set(forks)]
        handles = [fork.register_prehook(partial(came.__setitem__, fork)) for fork in forks]
        try:
            if to:
                edges = [GradientEdge(node, 0) for node in to]
                self.engine(self.roots, self.grads, True, inputs=edges)
        finally:
            for handle in handles:
                handle.remove()
        return came

    def weights(self) -> None:
        """The second part, newest layers first."""
        while self.groups:
            group = self.groups.pop(0)
            if group.roots:
                edges = [GradientEdge(leaf, 0) for leaf in group.leaves]
                self.engine(group.roots, group.grads, False, inputs=edges)


def _why_whole(group: Group, whole: Callable[[Any], str]) -> str:
    """Why the gradients of these weights cannot be put off; empty where they can."""
    for start in group.starts:
        if isinstance(start, BackwardCFunction):
            name = type(start).__name__.removesuffix("Backward")
            return f"the autograd.Function {name} takes them: let it take what is made of them"
    fork: Any
    for fork in group.forks:
        if _HOOKED in fork.metadata:
            return f"a hook on the result of {fork.name()} may run once only: remove it"
    if len(group.forks) + group.from_roots > 1:
        return "used more than once in a visit: use them once, or on another visit"
    if any(hasattr(leaf.variable, _AT_ONCE) for leaf in group.leaves):
        return "gathered for one backward: keep them gathered (stage 1 or 2 of sharded state)"
    return next(filter(None, map(whole, [*group.forks, *group.nodes])), "")


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def drop_saved(node: Any) -> None:
    """Free what a node has saved: it will not run again."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed already
            continue
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            try:
                saved.register_hooks(_nothing, _gone)
            except (RuntimeError, AttributeError):  # there is none, or hooks of others keep it
                continue


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: Any) -> Tensor:
    raise RuntimeError(
        "pipeline.run: this part of the graph was differentiated already: the gradients of a "
        "visit's inputs (I) free what its weights (W) do not need"
    )
