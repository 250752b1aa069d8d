"""The tree of a module's modules, in order of definition, and the segments that follow from it.

A parameter belongs to the segment of the node that holds it. The ``cover`` of a node is a module
with a forward that needs the parameters of the node. A ModuleList has no forward, so the module
around it needs its own parameters. nn.MultiheadAttention reads the parameters of its children and
never calls them, so it is their cover, too. Sizes come from specs alone: all ranks, also off the
mesh, find the same segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from disttensor.checks import has_own_operators
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
_NO_FORWARD = nn.Module.forward
_READS_CHILDREN = (nn.MultiheadAttention,)


class SegmentSpec(NamedTuple):
    """``params`` are gathered before the first of ``modules`` runs, and freed after the last."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[Tensor, ...]


class SegmentId:
    """Identifies a segment: the index of its first node, and the name of its module if it has one
    module."""

    def __init__(self, start: int, name: str = "") -> None:
        self.start, self.name = start, name


class ModuleNode:
    """A place of a module in the tree. The second place of a module is a leaf with all its
    parameters."""

    segment: SegmentId
    cover: ModuleNode  # the node whose forward needs the parameters of this node
    repeated: bool  # the module has an earlier node

    def __init__(self, module: nn.Module, name: str, parent: ModuleNode | None, index: int) -> None:
        self.module, self.name, self.parent = module, name, parent
        self.title = name or type(module).__name__
        self.index, self.end = index, index + 1  # of its subtree
        self.params: list[Tensor] = []
        self.total = self.nbytes = 0  # of its subtree; the bytes of a tied one at its first node
        self.is_leaf = True  # no module in it holds parameters
        self.own_segment = SegmentId(index, self.title)  # of parameters in no smaller segment
        forward = getattr(module.forward, "__func__", module.forward)
        self.is_read: bool = parent is not None and (
            parent.is_read or isinstance(parent.module, _READS_CHILDREN)
        )
        runs = parent is None or (forward is not _NO_FORWARD and not self.is_read)
        self.runner: ModuleNode = self if runs else parent.runner  # type: ignore[union-attr]


Use = tuple[Tensor, list[ModuleNode]]  # a parameter, and the modules that need it


def module_tree(module: nn.Module, ignored: Collection[int] = ()) -> list[ModuleNode]:
    """Returns all nodes, parents first, without the parameters whose ids are ``ignored``."""
    nodes: list[ModuleNode] = []
    seen: set[int] = set()
    counted: set[int] = set()

    def visit(module: nn.Module, name: str, parent: ModuleNode | None) -> ModuleNode:
        node = ModuleNode(module, name, parent, len(nodes))
        nodes.append(node)
        node.repeated = id(module) in seen
        seen.add(id(module))
        params = module.parameters() if node.repeated else module._parameters.values()
        node.params = [
            p for p in params if p is not None and not has_own_operators(p) and id(p) not in ignored
        ]
        node.total = len(node.params)
        for p in node.params:
            node.nbytes += 0 if id(p) in counted else _nbytes(p)
            counted.add(id(p))
        for key, child in () if node.repeated else module._modules.items():
            if child is not None:
                below = visit(child, f"{name}.{key}" if name else key, node)
                node.total += below.total
                node.nbytes += below.nbytes
                node.is_leaf = node.is_leaf and not below.total
        node.end = len(nodes)
        return node

    visit(module, "", None)
    return nodes


def _nbytes(p: Tensor) -> int:
    """Returns the bytes on the first rank of the mesh, which holds the most; all ranks know it."""
    if not isinstance(p, DistTensor):
        return p.numel() * p.itemsize
    return p.spec.box_at((0,) * p.spec.mesh.ndim).numel * p.itemsize


def segment_specs(nodes: list[ModuleNode]) -> list[SegmentSpec]:
    """Returns the segments, from the ``segment`` and ``cover`` of each node."""
    holders: dict[int, tuple[Tensor, list[ModuleNode]]] = {}
    for node in nodes:
        for p in node.params:
            holders.setdefault(id(p), (p, []))[1].append(node)
    members: dict[SegmentId, list[Use]] = {}
    for p, at in holders.values():
        first = at[0]
        if any(
            n.segment is not first.segment or (n.repeated and n.cover is not first.cover)
            for n in at
        ):
            at = [_lowest_common(at)]
        members.setdefault(at[0].segment, []).append((p, [node.cover for node in at]))
    found = sorted(members, key=lambda segment: segment.start)
    return [spec for segment in found for spec in _specs(segment, members[segment])]


def _lowest_common(nodes: list[ModuleNode]) -> ModuleNode:
    """Returns the lowest node that contains all ``nodes``."""
    low, high = min(n.index for n in nodes), max(n.index for n in nodes)
    node = nodes[0]
    while not (node.index <= low and high < node.end):
        assert node.parent is not None
        node = node.parent
    return node


def _specs(segment: SegmentId, uses: list[Use]) -> Iterator[SegmentSpec]:
    """Yields one SegmentSpec for each mesh of the parameters of a segment."""
    by_mesh: dict[Any, list[Use]] = {}
    for p, covers in uses:
        mesh = p.spec.mesh if isinstance(p, DistTensor) else None
        by_mesh.setdefault(mesh, []).append((p, covers))
    for mesh, some in by_mesh.items():
        covers = sorted({node for _, covers in some for node in covers}, key=lambda n: n.index)
        outermost: list[ModuleNode] = []
        for node in covers:
            if not outermost or node.index >= outermost[-1].end:
                outermost.append(node)
        ends = dict.fromkeys((outermost[0].title, outermost[-1].title))
        name = segment.name or " .. ".join(ends)
        if len(by_mesh) > 1:
            name += f" on {mesh}" if mesh is not None else " on no mesh"
        modules = {id(node.module): node.module for node in outermost}
        yield SegmentSpec(name, tuple(modules.values()), tuple(p for p, _ in some))
