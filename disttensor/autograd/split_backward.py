"""A backward in two parts: the gradients of received tensors, and later the gradients of weights.

Nodes of the graph are of two kinds: nodes that lead to a received tensor (if there is none, to the
first layer), the *input path*, and nodes that lead to weights only. The first part runs the input
path. A node of it from which weights branch off, a *fork*, runs twice, each time for the gradients
of one part: the matrix products of a layer's input and of its weight are one node of autograd. The
gradient of a fork is kept for the second part, and tensors saved by the other nodes are freed.

The gradient of a weight is computed in the first part if the second part would need the gradients
of several forks: the weight is used several times in the graph, by a Python node that makes other
gradients too, in a recomputed region, or it is marked by ``compute_weight_now``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from disttensor.autograd import token
from disttensor.autograd.fork_groups import BackwardGraph, ParamGroup, groups_of
from disttensor.graph_nodes import node_of

Tensor = torch.Tensor
_UNSPLIT = "disttensor_unsplit_gradient"
_HOOKED = "disttensor.hooked"
_REENTRANT = "CheckpointFunctionBackward"  # it cannot run for some leaves only
Engine = Callable[..., None]
# weights whose gradients are computed in the first part, and why
UnsplitWeights = tuple[list[Tensor], str]
REGION = (
    "computed again in the backward, which is done once: leave recompute (checkpoint) out where "
    "gradients are to be deferred"
)


def compute_weight_now(leaf: Tensor) -> None:
    """Marks a leaf whose gradient is never deferred."""
    setattr(leaf, _UNSPLIT, True)


def mark_hooked(node: Any) -> None:
    """Marks a node with hooks, which may run once in a backward."""
    if node is not None:
        node.metadata[_HOOKED] = True


class SplitBackward:
    """The backward of ``roots`` with these gradients.

    keep_whole(node)   the reason why its part of the graph cannot be split; empty if it can
    engine             ``torch.autograd.backward``, or a function that calls it
    readers, stops     nodes that the first part runs, and the nodes below at which the graph ends

    ``is_whole``: the second part is empty. ``unsplit``: weights of the first part, with reasons.
    """

    def __init__(
        self, roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor], *,
        keep_whole: Callable[[Any], str], engine: Engine, readers: Collection[Any] = (),
        stops: Collection[Any] = (),
    ) -> None:  # fmt: skip
        self.engine, self.readers = engine, readers
        self.roots: list[Any] = list(roots)
        self.grads = list(grads)
        self.edges = [r.node if isinstance(r, GradientEdge) else node_of(r) for r in roots]
        anchors = [node_of(anchor) for anchor in token.anchors()]
        self.graph = BackwardGraph(self.edges, [*anchors, *readers], stops)
        reenters = any(node.name() == _REENTRANT for node in self.graph.order)
        self.groups: list[ParamGroup] = []
        self.unsplit: list[UnsplitWeights] = []
        for group in groups_of(self.graph, self.edges):
            why = REGION if reenters else _why_unsplit(group, keep_whole)
            if why:
                self.unsplit.append(([leaf.variable for leaf in group.leaves], why))
            else:
                self.groups.append(group)
        self.is_whole = not self.groups

    def inputs(self) -> None:
        """Runs the first part."""
        graph, groups, roots, grads = self.graph, self.groups, self.roots, self.grads
        if self.is_whole and not self.readers:
            self.engine(roots, grads, False)
        elif self.is_whole:
            edges = [GradientEdge(node, 0) for node in (*graph.leaves, *graph.anchors)]
            self.engine(roots, grads, False, inputs=edges)
        else:
            fork_grads = self._run_input_path()
            for group in groups:
                group.begin(roots, self.edges, grads, fork_grads)
        later = {node for group in groups for node in group.second}
        for node in graph.order if groups else ():
            if node not in later:
                drop_saved(node)
        for group in groups:
            group.forget()
        self.roots, self.grads, self.edges = [], [], []
        del self.graph  # the groups hold the nodes that are still needed

    def _run_input_path(self) -> dict[Any, Any]:
        """Runs the input path, and returns the gradients of the forks."""
        graph = self.graph
        fork_grads: dict[Any, Any] = {}
        deferred = {leaf for group in self.groups for leaf in group.leaves}
        forks = [fork for group in self.groups for fork in group.forks]
        to = [leaf for leaf in graph.leaves if leaf not in deferred] + graph.anchors
        to += [end for end in graph.ends if end in set(forks)]
        handles = [fork.register_prehook(partial(fork_grads.__setitem__, fork)) for fork in forks]
        try:
            if to:
                edges = [GradientEdge(node, 0) for node in to]
                self.engine(self.roots, self.grads, True, inputs=edges)
        finally:
            for handle in handles:
                handle.remove()
        return fork_grads

    def weights(self) -> None:
        """Runs the second part, newest layers first."""
        while self.groups:
            group = self.groups.pop(0)
            if group.roots:
                edges = [GradientEdge(leaf, 0) for leaf in group.leaves]
                self.engine(group.roots, group.grads, False, inputs=edges)


def _why_unsplit(group: ParamGroup, keep_whole: Callable[[Any], str]) -> str:
    """Returns the reason why the gradients of these weights cannot be deferred, or ""."""
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
    if any(hasattr(leaf.variable, _UNSPLIT) for leaf in group.leaves):
        return "gathered for one backward: keep them gathered (stage 1 or 2 of sharded state)"
    return next(filter(None, map(keep_whole, [*group.forks, *group.nodes])), "")


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def drop_saved(node: Any) -> None:
    """Frees the tensors that a node has saved: it will not run again."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed already
            continue
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            try:
                saved.register_hooks(_nothing, _gone)
            except (RuntimeError, AttributeError):  # nothing was saved, or other hooks keep it
                continue


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: Any) -> Tensor:
    raise RuntimeError(
        "pipeline.run: this part of the graph was differentiated already: the gradients of a "
        "visit's inputs (I) free what its weights (W) do not need"
    )
