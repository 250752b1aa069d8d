"""Gradient edges of DistTensors: the results of ``torch.autograd.graph.get_gradient_edge``.

An edge of torch is a node of autograd's graph and a number. The gradient of a DistTensor collects
at several nodes, and each has the piece of this rank. So the node of such an edge is a
``TensorNode``, which refers to the DistTensor: calls of autograd accept the edge as they accept the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from disttensor.core.layout import Axes
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.hooks import make_from_local
from disttensor.tensor.uses import leaves_of


class _Metadata(NamedTuple):
    """As of a node of torch: of an output of its forward."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool = False
    is_cpp_nested_tensor: bool = False


class TensorNode:
    """Takes the place of the node of a local.

    of      the leaf itself. For another tensor, a tensor of its spec without its value: the edge
            stays where the tensor was in the graph, also after a write to the tensor.
    places  torch's edges of a tensor that is no leaf: of its local, and of its uses that are made
            from its source, each with the axes over which they vary. Empty for a leaf.
    """

    def __init__(self, x: MeshTensor) -> None:
        """Later uses of x are made from its local: all ranks of the mesh make the call."""
        self.of, self.places = x, list[tuple[Axes, GradientEdge]]()
        edges = _edges_of(x)
        self._node = edges[0][1].node if edges else None  # None off the mesh
        self._input_metadata = {x.output_nr: _Metadata(x.spec.shape, x.dtype, x.device)}
        if not x.local.is_leaf and x.is_initialized:
            make_from_local(x, "get_gradient_edge")
            with torch.enable_grad():
                like = x.local.new_zeros((), requires_grad=True).expand(x.local.shape)
            self.of, self.places = x.like(like, x.spec), edges

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == getattr(other, "_node", other)

    def __hash__(self) -> int:
        return hash(self._node)

    def register_hook(self, fn: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(
            f"a hook on the node of {self.of.spec!r}: it would get the gradients of the piece of "
            "this rank, and a tensor has several nodes. Register it on the tensor, which gets the "
            "gradient as a DistTensor: x.register_hook"
        )

    register_prehook = register_hook


def _edges_of(x: MeshTensor) -> list[tuple[Axes, GradientEdge]]:
    return [(axes, get_gradient_edge(t)) for axes, t in leaves_of(x) if t.requires_grad]


def tensor_node(x: Any) -> TensorNode | None:
    """Returns the node of an edge of a DistTensor; None for anything else."""
    node: Any = x.node if isinstance(x, GradientEdge) else None
    return node if type(node) is TensorNode else None


# Changes to torch (``disttensor.patches``) --------------------------------------------------------


def wrap_node_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's function that returns the node of a tensor or an edge."""

    @wraps(original)
    def node_of(t: Any) -> Any:
        is_ours = isinstance(t, MeshTensor) and t.requires_grad
        return TensorNode(t) if is_ours else original(t)

    return node_of


def wrap_will_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's function that returns True if the present backward runs a node."""

    @wraps(original)
    def will_execute(node: Any) -> bool:
        if type(node) is not TensorNode:
            return bool(original(node))
        return any(original(edge.node) for _, edge in node.places or _edges_of(node.of))

    return will_execute
