"""Where a backward enters and leaves the part of the graph that one forward of a segment made.

It enters with the first gradient of an output, and has left when the gradients of all inputs are
complete: then no node in between needs the parameters any more. Both are moments at which a node is
about to run, so that nothing is put into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
_KEY = "disttensor.boundary"


class Pass:
    """One forward of a segment's modules.

    inputs  nodes through which a backward leaves; left: how many of them it has left through
    beside  all passes of its segment in one forward of the root, this one among them
    """

    __slots__ = ("beside", "entered", "inputs", "left", "on_enter", "on_leave", "segment")

    def __init__(
        self, segment: Any, on_enter: Callable[[Pass], None], on_leave: Callable[[Pass], None]
    ) -> None:
        self.segment, self.on_enter, self.on_leave = segment, on_enter, on_leave
        self.inputs = self.left = 0
        self.entered = False
        self.beside: list[Pass] = [self]

    def takes(self, inputs: list[Tensor]) -> None:
        """These are the arguments of one of the modules."""
        for x in inputs:
            node = node_of(x)
            if node is not None and not any(self is p for p in boundary(node).entering):
                boundary(node).leaving.append(self)
                self.inputs += 1

    def gives(self, outputs: list[Tensor], settle: bool) -> None:
        """These are its results. ``settle``: every gradient of theirs must come by here."""
        for x in outputs:
            node = node_of(x)
            if node is None:
                self.elsewhere(x)
                continue
            if settle and isinstance(x, DistTensor):
                x._origin = x._aliases = None
            hook = boundary(node)
            if not any(self is p for p in hook.entering):
                hook.entering.append(self)
            self.entered = True

    def elsewhere(self, x: Tensor) -> None:
        """What became of the results lies on another stage: a backward there says that this one is
        about to come."""
        if self.segment.free_after_forward or not isinstance(x, DistTensor):
            return
        if not x.is_initialized and x.local.grad_fn is not None:
            boundary(x.local.grad_fn).announcing.append(self)
            self.entered = True

    def keeps(self, tensors: list[Tensor], settle: bool) -> None:
        """These are kept on the modules; what was there before this forward is known already."""
        for x in tensors:
            node = node_of(x)
            found = node.metadata.get(_KEY) if node is not None else None
            if node is not None and not (
                found and any(p.segment is self.segment for p in found.entering)
            ):
                self.gives([x], settle)

    @property
    def over(self) -> bool:
        return self.left >= self.inputs


class Boundary:
    """What happens before one node runs: segments are left before others are entered, so that fewer
    are whole at once."""

    __slots__ = ("announcing", "entering", "leaving")

    def __init__(self) -> None:
        self.leaving: list[Pass] = []
        self.entering: list[Pass] = []
        self.announcing: list[Pass] = []

    def __call__(self, grads: Any) -> None:
        for one in self.leaving:
            one.left += 1
            one.on_leave(one)
        for one in self.entering:
            one.on_enter(one)
        for one in self.announcing:
            one.segment.gather()


def node_of(x: Tensor) -> Any:
    """The node that made x; None where x is a leaf or in no graph, or elsewhere (what runs there
    has no values)."""
    if isinstance(x, DistTensor) and not x.is_initialized:
        return None
    local = x.local if isinstance(x, DistTensor) else x
    return local.grad_fn


def boundary(node: Any) -> Boundary:
    found = node.metadata.get(_KEY)
    if found is None:
        found = node.metadata[_KEY] = Boundary()
        node.register_prehook(found)
    return found
