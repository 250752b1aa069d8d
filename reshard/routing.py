"""Plans which rank sends which elements to which rank, in one mesh or between two. The plan is the
same on every rank.

The locals of the source split the tensor into cells; replicas hold the same cell. A receiver needs
the part of each cell that lies in its target box, except of the cell that it holds itself. It gets
each part from one rank that holds the cell: the ``nearest``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from disttensor.cache import cached
from disttensor.core.layout import Box
from disttensor.core.spec import DistSpec
from reshard.registry import Axes

Key = tuple[Axes, Box]  # coordinates on the axes of reductions that stay, and the box of a cell
Message = tuple[int, Box]  # the other rank, and the box that is sent


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one rank: the boxes that it has (``source``), needs (``target``) and keeps, and
    its messages. None: an empty box."""

    source: Box | None
    target: Box | None
    kept: Box | None
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Routing:
    """The messages of all ranks: ``messages[sender, receiver]``. A rank holds one cell, so there is
    at most one between two ranks.

    ``nearest(receiver, holder, elements)`` orders the holders of a cell; ``elements`` are those
    that the holder has to send so far.
    """

    def __init__(
        self,
        held: Mapping[int, Key],
        needed: Mapping[int, Key],
        nearest: Callable[[int, int, int], tuple[Any, ...]],
    ) -> None:
        self.held, self.needed = held, needed
        self.messages: dict[tuple[int, int], Box] = {}
        self.sent = dict.fromkeys(held, 0)  # elements, by sender
        holders: dict[Key, list[int]] = {}
        for rank, key in held.items():
            holders.setdefault(key, []).append(rank)
        cells = {box for _, box in held.values() if box.numel}
        grid = _grid(cells)
        for receiver, (at, target) in needed.items():
            for cell in _overlapping(grid, target) if cells and target.numel else ():
                ranks = holders[at, cell]
                piece = cell.intersect(target)
                if piece and receiver not in ranks:
                    order = [(nearest(receiver, r, self.sent[r]), r) for r in ranks]
                    sender = min(order)[1]
                    self.sent[sender] += piece.numel
                    self.messages[sender, receiver] = piece

    @property
    def elements(self) -> int:
        """Returns the number of elements that are sent."""
        return sum(self.sent.values())

    def of(self, rank: int) -> Routes:
        """Returns the routes of ``rank``."""
        source, target = self.held.get(rank), self.needed.get(rank)
        kept = None
        if source and target and source[0] == target[0]:  # else summands of a reduction
            kept = source[1].intersect(target[1])
        return Routes(
            source and source[1],
            target and target[1],
            kept,
            tuple((to, box) for (r, to), box in self.messages.items() if r == rank),
            tuple((r, box) for (r, to), box in self.messages.items() if to == rank),
        )


def within(src: DistSpec, dst: DistSpec, axes: Axes) -> Routes:
    """Returns the routes of this rank in one mesh, for specs that differ on ``axes`` only. Ranks
    are positions in the group of the axes.

    The nearest holder differs from the receiver on the fewest axes. Of several equally near holders
    the next one sends, so that senders share the work.
    """
    mesh = src.mesh
    assert mesh.coordinate is not None
    places = mesh.members(axes, mesh.coordinate)
    me = places.index(mesh.coordinate)

    def nearest(receiver: int, holder: int, elements: int) -> tuple[Any, ...]:
        steps = tuple((places[holder][a] - places[receiver][a]) % mesh.shape[a] for a in axes)
        return sum(s > 0 for s in steps), steps

    held = {i: ((), src.box_at(place)) for i, place in enumerate(places)}
    needed = {i: ((), dst.box_at(place)) for i, place in enumerate(places)}
    mine = {i: key for i, key in held.items() if key == held[me]}  # other boxes do not matter here
    sends = Routing(mine, needed, nearest).of(me)
    return replace(sends, receives=Routing(held, {me: needed[me]}, nearest).of(me).receives)


@cached(1024)
def between(src: DistSpec, dst: DistSpec, kept: Axes, once: Axes) -> Routing:
    """Returns the messages from one mesh to another.

    Reductions of ``src`` are pending only on the ``kept`` axes, which both meshes have. They are
    sent unreduced: a value at coordinate i of such an axis goes to coordinate i of the same axis on
    the other mesh. On the axes ``once`` of dst's mesh only the first rank receives. The nearest
    holder is the holder that has to send least so far; of several the next one after the receiver's
    own place. So replicas share the work, and between meshes of one shape with equal placements
    each rank sends to the rank at its own coordinate.
    """
    at_src = {rank: i for i, rank in enumerate(src.mesh.ranks)}
    at_dst = {rank: i for i, rank in enumerate(dst.mesh.ranks)}

    def nearest(receiver: int, holder: int, elements: int) -> tuple[Any, ...]:
        return elements, (at_src[holder] - at_dst[receiver]) % len(at_src)

    return Routing(dict(_keys(src, kept, ())), dict(_keys(dst, kept, once)), nearest)


def _keys(spec: DistSpec, kept: Axes, once: Axes) -> Iterator[tuple[int, Key]]:
    for rank, coordinate in zip(spec.mesh.ranks, spec.mesh.coordinates(), strict=True):
        if not any(coordinate[a] for a in once):
            yield rank, (tuple(coordinate[a] for a in kept), spec.box_at(coordinate))


def _grid(boxes: set[Box]) -> list[list[tuple[int, int]]]:
    """Returns the intervals (start, length) of each dim in order, without overlap. Each product
    of intervals is a box."""
    dims = zip(*(zip(*box, strict=True) for box in boxes), strict=True)
    return [sorted(set(intervals)) for intervals in dims]


def _overlapping(grid: list[list[tuple[int, int]]], target: Box) -> Iterator[Box]:
    """Returns the boxes of the grid that have elements in ``target``, in order."""
    hits = []
    for intervals, start, size in zip(grid, *target, strict=True):
        first = bisect_right(intervals, start, key=sum)  # ends after start
        until = bisect_left(intervals, start + size, key=itemgetter(0))
        hits.append(intervals[first:until])
    for cell in itertools.product(*hits):
        yield Box(tuple(a for a, _ in cell), tuple(n for _, n in cell))
