"""Segments: which parameters of a module are gathered, freed and reduced together. Nothing here
changes a module.

Three ways to give each place in the tree of modules (``disttensor.fsdp.module_tree``) its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from disttensor.fsdp.module_tree import Cut as Cut
from disttensor.fsdp.module_tree import Home, Place, cuts, tree
from disttensor.nn.names import known, matching

MIB = 2**20


@dataclass(frozen=True, slots=True)
class SegmentBySize:
    """Neighbouring modules share a segment while their parameters fit into ``megabytes`` (of 2**20
    bytes) on a rank.

    A module with more is divided into those that it is made of. What such a module holds directly
    is a segment of its own. What counts is the first rank of a mesh, which holds the most. Raises
    ValueError unless positive.

    >>> dt.SegmentBySize(8)
    SegmentBySize(megabytes=8)
    >>> dt.SegmentBySize().megabytes
    32.0
    """

    megabytes: float = 32.0

    def __post_init__(self) -> None:
        if not self.megabytes > 0:  # NaN is not
            raise ValueError(
                f"SegmentBySize: megabytes={self.megabytes}: a segment has a positive size"
            )


@dataclass(frozen=True, slots=True)
class SegmentByAnchors:
    """A segment begins at each of the modules ``names`` and goes on, in order of definition, to the
    next of them.

    What stands before the first is a segment too. What a module around anchors holds directly is a
    segment of its own. Raises ValueError for no name and for one given twice.

    >>> dt.SegmentByAnchors(["blocks.0", "blocks.4", "norm"]).names
    ('blocks.0', 'blocks.4', 'norm')
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _checked("SegmentByAnchors", self.names))


Segments = SegmentBySize | SegmentByAnchors | Sequence[str]


def segments_of(module: nn.Module, how: Segments) -> list[Cut]:
    """Each parameter of ``module`` in one segment; segments and what is in them in order of
    definition.

    ``how`` may be names of modules, or globs in which ``*`` stands for one part of a name: each
    module that matches is a segment, without those inside it that match too; all the rest is one. A
    parameter that several segments hold (it is tied, or its module stands in several places) is in
    the one of the lowest module around all its places. Parameters on different meshes are in
    different segments. ``module`` itself is taken to run, with a forward or without. Raises
    ValueError for names that no module has, and TypeError for what is not a list of names.
    """
    nodes = tree(module)
    if isinstance(how, SegmentBySize):
        _by_size(nodes, how.megabytes * MIB)
    elif isinstance(how, SegmentByAnchors):
        _by_anchors(nodes, how.names)
    else:
        _by_names(nodes, _checked("segments", how))
    return cuts(nodes)


# Three ways to give each node a home --------------------------------------------------------------


def _by_size(nodes: list[Place], limit: float) -> None:
    current, filled = Home(-1), limit
    for unit in _units(nodes, lambda node: node.nbytes <= limit or node.is_leaf):
        if current.start < 0 or filled + unit.nbytes > limit:
            current, filled = Home(unit.index), 0.0
        filled += unit.nbytes
        for node in nodes[unit.index : unit.end]:
            node.home, node.cover = current, unit


def _by_anchors(nodes: list[Place], names: Sequence[str]) -> None:
    by_name = {node.name: node for node in nodes}
    around: dict[Place, str] = {}  # module -> an anchor in it
    for name in names:
        if name not in by_name:
            raise ValueError(f"SegmentByAnchors: {_unknown(name, nodes)}")
        if not by_name[name].total:
            raise ValueError(
                f"SegmentByAnchors: {name!r} has no parameters to begin a segment with"
            )
        place = by_name[name].parent
        while place is not None and place not in around:
            around[place] = name
            place = place.parent
    for name in names:
        if by_name[name] in around:
            raise ValueError(
                f"SegmentByAnchors: {around[by_name[name]]!r} is inside of {name!r}, and segments do "
                "not nest: leave one out"
            )
    waiting = sorted((by_name[name].index for name in names), reverse=True)
    current = Home(-1)
    for unit in _units(nodes, lambda node: node not in around):
        if current.start < 0 or (waiting and waiting[-1] <= unit.index):
            current = Home(unit.index)
        while waiting and waiting[-1] <= unit.index:
            waiting.pop()
        for node in nodes[unit.index : unit.end]:
            node.home, node.cover = current, unit


def _units(nodes: list[Place], whole: Callable[[Place], bool]) -> Iterator[Place]:
    """The largest modules that run and are ``whole``. What is held around them is at home in the
    module that needs it."""
    index = 0
    while index < len(nodes):
        node = nodes[index]
        index += 1
        if node.runner is node and whole(node):
            yield node
            index = node.end
        else:
            node.home, node.cover = node.runner.own, node.runner


def _by_names(nodes: list[Place], patterns: Sequence[str]) -> None:
    named: set[Place] = set()
    by_name = {node.name: node for node in nodes}
    for pattern in patterns:
        found = [by_name[name] for name in matching(pattern, by_name)]
        if not found:
            raise ValueError(f"segments: {_unknown(pattern, nodes)}")
        if not any(node.total for node in found):
            raise ValueError(f"segments: what {pattern!r} names has no parameters")
        named.update(found)
    runs: dict[Place, Place | None] = {}  # the highest in its segment that runs
    for node in nodes:
        if node.parent is None or node in named:
            node.home, runs[node] = node.own, None
        else:
            node.home, runs[node] = node.parent.home, runs[node.parent]
        if runs[node] is None and node.runner is node:
            runs[node] = node
        node.cover = runs[node] or node.runner


def _checked(what: str, names: Any) -> tuple[str, ...]:
    """Names as a tuple. Raises TypeError and ValueError for what is no list of different names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        sizes = ", or dt.SegmentBySize(megabytes)" if what == "segments" else ""
        raise TypeError(f"{what}: a list of names of modules is wanted{sizes}, not {names!r}")
    names = tuple(names)
    if not names:
        raise ValueError(f"{what}: the list of names is empty; name the modules that begin one")
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what}: {name!r} is no name of a module")
        if name in seen:
            raise ValueError(f"{what}: {name!r} is given twice")
        seen.add(name)
    return names


def _unknown(name: str, nodes: list[Place]) -> str:
    there = [node.name for node in nodes if node.name and node.total]
    return f"{name!r} is no module of {type(nodes[0].module).__name__}; there are " + (
        known(name, there) or "none with parameters inside it"
    )
