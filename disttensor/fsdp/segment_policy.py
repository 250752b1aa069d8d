"""Segment policies: which parameters of a module are gathered, freed and reduced together.

A policy gives each node of the tree of modules (``disttensor.fsdp.module_tree``) its segment. It
changes no module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from disttensor.checks import check_positive
from disttensor.fsdp.module_tree import (
    ModuleNode,
    SegmentId,
    SegmentSpec,
    module_tree,
    segment_specs,
)
from disttensor.nn.names import list_names, match_names

MIB = 2**20


class SegmentPolicy(ABC):
    __slots__ = ()

    @abstractmethod
    def assign(self, nodes: list[ModuleNode]) -> None:
        """Sets ``segment`` and ``cover`` of each node. The first node is the module itself; parents
        come before children. ``one_each`` does this for nodes that are one segment each."""


def one_each(nodes: list[ModuleNode], roots: Collection[ModuleNode]) -> None:
    """Makes each of ``roots`` a segment, without roots inside it, and the rest one segment."""
    runs: dict[ModuleNode, ModuleNode | None] = {}  # the highest in its segment that runs
    for node in nodes:
        if node.parent is None or node in roots:
            node.segment, runs[node] = node.own_segment, None
        else:
            node.segment, runs[node] = node.parent.segment, runs[node.parent]
        if runs[node] is None and node.runner is node:
            runs[node] = node
        node.cover = runs[node] or node.runner


@dataclass(frozen=True, slots=True)
class SegmentBySize(SegmentPolicy):
    """Neighbouring modules share a segment while their parameters fit into ``megabytes`` (of 2**20
    bytes) on a rank.

    A larger module is divided into its children; the parameters that it holds itself are a separate
    segment. Sizes are taken from the first rank of a mesh, which holds the most. Raises ValueError
    unless positive.

    >>> dt.fsdp.SegmentBySize(8)
    SegmentBySize(megabytes=8)
    >>> dt.fsdp.SegmentBySize().megabytes
    32.0
    """

    megabytes: float = 32.0

    def __post_init__(self) -> None:
        check_positive("SegmentBySize: megabytes", self.megabytes, "a positive size")

    def assign(self, nodes: list[ModuleNode]) -> None:
        limit = self.megabytes * MIB
        current, filled = SegmentId(-1), limit
        for unit in _units(nodes, lambda node: node.nbytes <= limit or node.is_leaf):
            if current.start < 0 or filled + unit.nbytes > limit:
                current, filled = SegmentId(unit.index), 0.0
            filled += unit.nbytes
            for node in nodes[unit.index : unit.end]:
                node.segment, node.cover = current, unit


@dataclass(frozen=True, slots=True)
class SegmentByAnchors(SegmentPolicy):
    """A segment begins at each of the modules ``names`` and goes on, in order of definition, to the
    next of them.

    Modules before the first are a segment too. Parameters that a module around anchors holds itself
    are a separate segment. Raises ValueError for an empty list and for a repeated name.

    >>> dt.fsdp.SegmentByAnchors(["blocks.0", "blocks.4", "norm"]).names
    ('blocks.0', 'blocks.4', 'norm')
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _checked("SegmentByAnchors", self.names))

    def assign(self, nodes: list[ModuleNode]) -> None:
        by_name = {node.name: node for node in nodes}
        around: dict[ModuleNode, str] = {}  # module -> an anchor in it
        for name in self.names:
            if name not in by_name:
                raise ValueError(f"SegmentByAnchors: {_unknown(name, nodes)}")
            if not by_name[name].total:
                raise ValueError(
                    f"SegmentByAnchors: {name!r} has no parameters to begin a segment with"
                )
            node = by_name[name].parent
            while node is not None and node not in around:
                around[node] = name
                node = node.parent
        for name in self.names:
            if by_name[name] in around:
                raise ValueError(
                    f"SegmentByAnchors: {around[by_name[name]]!r} is inside of {name!r}, and "
                    "segments do not nest: leave one out"
                )
        waiting = sorted((by_name[name].index for name in self.names), reverse=True)
        current = SegmentId(-1)
        for unit in _units(nodes, lambda node: node not in around):
            if current.start < 0 or (waiting and waiting[-1] <= unit.index):
                current = SegmentId(unit.index)
            while waiting and waiting[-1] <= unit.index:
                waiting.pop()
            for node in nodes[unit.index : unit.end]:
                node.segment, node.cover = current, unit


class _SegmentByNames(SegmentPolicy):
    """Each module that a name or glob matches is a segment. A list of names and globs is one
    segment of all modules that they match."""

    def __init__(self, patterns: Any) -> None:
        self.patterns = _checked("segments", patterns)

    def assign(self, nodes: list[ModuleNode]) -> None:
        by_name = {node.name: node for node in nodes}
        roots: set[ModuleNode] = set()
        in_list: set[ModuleNode] = set()
        for entry in self.patterns:
            found: dict[ModuleNode, None] = {}
            for pattern in _names_of(entry):
                names = match_names(pattern, by_name)
                if not names:
                    raise ValueError(f"segments: {_unknown(pattern, nodes)}")
                found.update(dict.fromkeys(by_name[name] for name in names))
            roots.update(found)
            if not isinstance(entry, str):
                twice = [node.name for node in found if node in in_list]
                if twice:
                    raise ValueError(
                        f"segments: {twice[0]!r} is in two lists of modules that share a segment: "
                        "leave it out of one"
                    )
                in_list.update(found)
                shared = SegmentId(min(node.index for node in found))
                for node in found:
                    node.own_segment = shared
        one_each(nodes, roots)


Segments = SegmentPolicy | Sequence[str | Sequence[str]]


def segments_of(
    module: nn.Module, how: Segments, ignored: Collection[int] = ()
) -> list[SegmentSpec]:
    """Assigns each parameter of ``module`` to one segment; returns the segments in order of
    definition.

    ``how``: a policy, or names of modules, or globs in which ``*`` stands for one part of a name:
    each module that matches is a segment, without matches inside it; the rest is one segment. A
    list of names and globs among them is one segment of several modules, which has priority.
    ``ignored``: ids of parameters that are in no segment. A parameter of several segments (it is
    tied, or its module has several places) goes to the segment of the lowest module around all its
    places. Parameters on different meshes are in different segments. ``module`` itself is assumed
    to run, even without a forward. Raises ValueError for names that match no module, and TypeError
    if the names are not a list of names.
    """
    policy = how if isinstance(how, SegmentPolicy) else _SegmentByNames(how)
    nodes = module_tree(module, ignored)
    policy.assign(nodes)
    return segment_specs(nodes)


def _units(nodes: list[ModuleNode], fits: Callable[[ModuleNode], bool]) -> Iterator[ModuleNode]:
    """Yields the largest modules that run and ``fits``; other parameters go to the segment of their
    runner."""
    index = 0
    while index < len(nodes):
        node = nodes[index]
        index += 1
        if node.runner is node and fits(node):
            yield node
            index = node.end
        else:
            node.segment, node.cover = node.runner.own_segment, node.runner


def _checked(what: str, names: Any) -> tuple[str, ...]:
    """Returns names as a tuple. Raises TypeError or ValueError unless they are a list of different
    names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        sizes = ", or dt.fsdp.SegmentBySize(megabytes)" if what == "segments" else ""
        raise TypeError(f"{what}: a list of names of modules is wanted{sizes}, not {names!r}")
    names = tuple(names)
    if not names:
        raise ValueError(f"{what}: the list of names is empty; name the modules that begin one")
    seen: set[str] = set()
    for entry in names:
        parts = _names_of(entry) if what == "segments" else (entry,)
        if not parts:
            raise ValueError(f"{what}: the list {entry!r} in it is empty; name its modules")
        for name in parts:
            if not isinstance(name, str):
                raise TypeError(f"{what}: {name!r} is no name of a module")
            if name in seen:
                raise ValueError(f"{what}: {name!r} is given twice")
            seen.add(name)
    return names


def _names_of(entry: Any) -> tuple[Any, ...]:
    """Returns the names in an entry of ``segments``: one name, or a list for a shared segment."""
    return tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)


def _unknown(name: str, nodes: list[ModuleNode]) -> str:
    there = [node.name for node in nodes if node.name and node.total]
    return f"{name!r} is no module of {type(nodes[0].module).__name__}; there are " + (
        list_names(name, there) or "none with parameters inside it"
    )
