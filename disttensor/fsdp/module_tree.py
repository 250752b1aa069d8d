"""Places: the tree of a module's modules, in order of definition, and the cuts that follow once
each place has a home.

A parameter is at home in the segment of the place that holds it. The ``cover`` of a place is the
module whose forward needs what is held there: one that runs. A ModuleList has no forward, so what
it holds itself is needed by the module around it; so are the children of nn.MultiheadAttention,
which reads their parameters and never calls them. Sizes come from specs alone: all ranks, those
outside a mesh too, find the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
_NO_FORWARD = nn.Module.forward
_READS_CHILDREN = (nn.MultiheadAttention,)


class Cut(NamedTuple):
    """One segment. ``params`` are gathered before the first of ``modules`` runs, and freed after
    the last."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[Tensor, ...]


class Home:
    """A segment. ``start``: its first place. ``name``: of the module that it is of; without it its
    modules give the name."""

    def __init__(self, start: int, name: str = "") -> None:
        self.start, self.name = start, name


class Place:
    """A place of a module. A second place of the same module is a leaf with all its parameters."""

    home: Home
    cover: Place  # runs, and needs what is held here
    again: bool  # a module that has an earlier place

    def __init__(self, module: nn.Module, name: str, parent: Place | None, index: int) -> None:
        self.module, self.name, self.parent = module, name, parent
        self.title = name or type(module).__name__
        self.index, self.end = index, index + 1  # of its subtree
        self.params: list[Tensor] = []
        self.total = self.nbytes = 0  # of its subtree; the bytes of a tied one at its first place
        self.is_leaf = True  # nothing below holds parameters
        self.own = Home(index, self.title)  # of what is in no smaller one
        forward = getattr(module.forward, "__func__", module.forward)
        self.read: bool = parent is not None and (
            parent.read or isinstance(parent.module, _READS_CHILDREN)
        )
        runs = parent is None or (forward is not _NO_FORWARD and not self.read)
        self.runner: Place = self if runs else parent.runner  # type: ignore[union-attr]


Held = tuple[Tensor, list[Place]]  # a parameter, and the modules that need it


def tree(module: nn.Module) -> list[Place]:
    """All nodes, each before what is in it."""
    nodes: list[Place] = []
    seen: set[int] = set()
    counted: set[int] = set()

    def visit(module: nn.Module, name: str, parent: Place | None) -> Place:
        node = Place(module, name, parent, len(nodes))
        nodes.append(node)
        node.again = id(module) in seen
        seen.add(id(module))
        held = module.parameters() if node.again else module._parameters.values()
        node.params = [p for p in held if p is not None]
        node.total = len(node.params)
        for p in node.params:
            node.nbytes += 0 if id(p) in counted else _nbytes(p)
            counted.add(id(p))
        for key, child in () if node.again else module._modules.items():
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
    """On the first rank of its mesh: no rank holds more, and all ranks know it."""
    if not isinstance(p, DistTensor):
        return p.numel() * p.itemsize
    _, sizes = p.spec.box_at((0,) * p.spec.mesh.ndim)
    return torch.Size(sizes).numel() * p.itemsize


def cuts(nodes: list[Place]) -> list[Cut]:
    """What the homes and covers of all nodes come to."""
    places: dict[int, tuple[Tensor, list[Place]]] = {}
    for node in nodes:
        for p in node.params:
            places.setdefault(id(p), (p, []))[1].append(node)
    members: dict[Home, list[Held]] = {}
    for p, holders in places.values():
        first = holders[0]
        if any(
            n.home is not first.home or (n.again and n.cover is not first.cover) for n in holders
        ):
            holders = [_around(holders)]
        held = p, [node.cover for node in holders]
        members.setdefault(holders[0].home, []).append(held)
    found = sorted(members, key=lambda home: home.start)
    return [cut for home in found for cut in _cuts(home, members[home])]


def _around(nodes: list[Place]) -> Place:
    """The lowest node that all of these are in."""
    low, high = min(n.index for n in nodes), max(n.index for n in nodes)
    node = nodes[0]
    while not (node.index <= low and high < node.end):
        assert node.parent is not None
        node = node.parent
    return node


def _cuts(home: Home, held: list[Held]) -> Iterator[Cut]:
    """One for each mesh that its parameters lie on."""
    meshes: dict[Any, list[Held]] = {}
    for p, covers in held:
        mesh = p.spec.mesh if isinstance(p, DistTensor) else None
        meshes.setdefault(mesh, []).append((p, covers))
    for mesh, some in meshes.items():
        covers = sorted({node for _, covers in some for node in covers}, key=lambda n: n.index)
        outermost: list[Place] = []
        for node in covers:
            if not outermost or node.index >= outermost[-1].end:
                outermost.append(node)
        name = home.name or " .. ".join(dict.fromkeys((outermost[0].title, outermost[-1].title)))
        if len(meshes) > 1:
            name += f" on {mesh}" if mesh is not None else " on no mesh"
        modules = {id(node.module): node.module for node in outermost}
        yield Cut(name, tuple(modules.values()), tuple(p for p, _ in some))
