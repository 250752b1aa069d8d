"""Where a backward enters and leaves the part of the graph that one forward of a segment made.

It enters with the first gradient of an output, and has left when the gradients of all inputs are
complete: then no node in between needs the parameters any more. Hooks run before the nodes at these
places, so nothing is put into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.tensor.base import set_origin
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
_KEY = "disttensor.boundary"


class SegmentForward:
    """One forward of a segment's modules.

    inputs    how many nodes a backward leaves through; left: through how many it has
    begins    whether the graph begins in it: a module had no argument with a gradient, so no input
              tells when the backward has left that module
    entered   whether a backward can enter it
    siblings  all forwards of its segment in one forward of the root, this one among them
    """

    __slots__ = (
        "begins", "entered", "inputs", "left", "on_enter", "on_leave", "segment", "siblings"
    )  # fmt: skip

    def __init__(
        self,
        segment: Any,
        on_enter: Callable[[SegmentForward], None],
        on_leave: Callable[[SegmentForward], None],
        siblings: list[SegmentForward],
    ) -> None:
        self.segment, self.on_enter, self.on_leave = segment, on_enter, on_leave
        self.inputs = self.left = 0
        self.begins = self.entered = False
        self.siblings = siblings
        siblings.append(self)

    def add_inputs(self, inputs: list[Tensor]) -> None:
        """These are all arguments of one of the modules."""
        self.begins = self.begins or all(node_of(x) is None for x in inputs)
        for x in inputs:
            node = node_of(x)
            if node is not None and self not in boundary(node).entering:
                boundary(node).leaving.append(self)
                self.inputs += 1

    def add_outputs(self, outputs: list[Tensor], retire_aliases: bool) -> None:
        """These are results. ``retire_aliases``: each gradient of theirs has to pass this node."""
        for x in outputs:
            node = node_of(x)
            if node is None:
                self._add_off_mesh_output(x)
                continue
            if retire_aliases and isinstance(x, DistTensor):
                set_origin(x, None)
            hook = boundary(node)
            if self not in hook.entering:
                hook.entering.append(self)
            self.entered = True

    def _add_off_mesh_output(self, x: Tensor) -> None:
        """The result went to another stage: a backward there will come here next."""
        if self.segment.free_after_forward or not isinstance(x, DistTensor):
            return
        if not x.is_initialized and x.local.grad_fn is not None:
            boundary(x.local.grad_fn).announcing.append(self)
            self.entered = True

    def add_attributes(self, tensors: list[Tensor], retire_aliases: bool) -> None:
        """These are attributes of the modules; those of an earlier forward are known already."""
        for x in tensors:
            node = node_of(x)
            found = node.metadata.get(_KEY) if node is not None else None
            if node is not None and not (
                found and any(f.segment is self.segment for f in found.entering)
            ):
                self.add_outputs([x], retire_aliases)

    @property
    def is_left(self) -> bool:
        return self.left >= self.inputs


class Boundary:
    """What happens before one node runs: segments are left before others are entered, so that fewer
    are gathered at once."""

    __slots__ = ("announcing", "entering", "leaving")

    def __init__(self) -> None:
        self.leaving: list[SegmentForward] = []
        self.entering: list[SegmentForward] = []
        self.announcing: list[SegmentForward] = []

    def __call__(self, grads: Any) -> None:
        for forward in self.leaving:
            forward.left += 1
            forward.on_leave(forward)
        for forward in self.entering:
            forward.on_enter(forward)
        for forward in self.announcing:
            forward.segment.gather()


def node_of(x: Tensor) -> Any:
    """The node that made x; None for a leaf, for what is in no graph, and off the mesh."""
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
