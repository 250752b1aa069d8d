"""Who sends what to whom when a tensor goes from one mesh to another: pure, the same on every rank.

The locals of the source cut the tensor into cells; ranks that are replicas hold the same cell. A
receiver needs the part of each cell that lies in its target box, except of the cell that it holds
itself. Every other part comes from one rank that holds the cell: of those with the least to send so
far, the next one after the receiver's own place. So replicas share the work, and between meshes of
one shape with equal placements each rank sends to the one at its own coordinate.

Reductions that travel unreduced (``kept`` axes) stay on their coordinates: what lies at i on such
an axis goes to i on the same axis of the other mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from disttensor.cache import cached
from disttensor.layout import Box
from disttensor.spec import DistSpec

Axes = tuple[int, ...]
Key = tuple[Axes, Box]  # coordinates on the kept axes, and the box of a cell
Parcel = tuple[int, tuple[Box, ...]]  # the other rank, and what goes in one message


@dataclass(frozen=True, slots=True)
class Routes:
    """Of one rank: what it has, what it needs, and the messages between. None: nothing."""

    source: Box | None = None
    target: Box | None = None
    kept: Box | None = None
    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()


@dataclass(eq=False, slots=True)
class Routing:
    """The messages of all ranks: ``messages[sender, receiver]`` is what goes in one message."""

    held: dict[int, Key]
    needed: dict[int, Key]
    messages: dict[tuple[int, int], list[Box]]
    sent: dict[int, int] = field(default_factory=dict)  # elements, by sender

    @property
    def elements(self) -> int:
        """All that is sent."""
        return sum(self.sent.values())

    def of(self, rank: int) -> Routes:
        """What ``rank`` does. Boxes of a message are in the same order at both ends."""
        source, target = self.held.get(rank), self.needed.get(rank)
        kept = source[1].intersect(target[1]) if source and target else None
        if source and target and source[0] != target[0]:
            kept = None  # another summand of a reduction
        return Routes(
            source and source[1],
            target and target[1],
            kept,
            tuple((to, tuple(boxes)) for (r, to), boxes in self.messages.items() if r == rank),
            tuple((r, tuple(boxes)) for (r, to), boxes in self.messages.items() if to == rank),
        )


@cached(1024)
def routing(src: DistSpec, dst: DistSpec, kept: Axes, once: Axes) -> Routing:
    """``src`` has reductions on the ``kept`` axes only, of both meshes; of the axes ``once`` of
    dst's mesh only the first rank receives."""
    held = dict(_keys(src, kept, ()))
    needed = dict(_keys(dst, kept, once))
    holders: dict[Key, list[int]] = {}
    for rank, key in held.items():
        holders.setdefault(key, []).append(rank)
    cells = _Cells(src, held)
    place = {rank: i for i, rank in enumerate(src.mesh.ranks)}
    out = Routing(held, needed, {}, dict.fromkeys(held, 0))
    for i, receiver in enumerate(dst.mesh.ranks):
        if receiver not in needed:
            continue
        at, target = needed[receiver]
        for cell in cells.overlapping(target):
            ranks = holders[at, cell]
            if receiver in ranks:
                continue
            piece = cell.intersect(target)
            assert piece is not None
            sender = min(ranks, key=lambda r: (out.sent[r], (place[r] - i) % len(place)))
            out.sent[sender] += piece.numel
            out.messages.setdefault((sender, receiver), []).append(piece)
    return out


def _keys(spec: DistSpec, kept: Axes, once: Axes) -> Iterator[tuple[int, Key]]:
    for rank, coordinate in zip(spec.mesh.ranks, spec.mesh.coordinates(), strict=True):
        if not any(coordinate[a] for a in once):
            yield rank, (tuple(coordinate[a] for a in kept), spec.box_at(coordinate))


class _Cells:
    """The cells of a source. They are a grid: each is the product of one interval per dim."""

    def __init__(self, src: DistSpec, held: dict[int, Key]) -> None:
        boxes = {box for _, box in held.values() if box.numel}
        self.intervals = [
            sorted({(starts[d], sizes[d]) for starts, sizes in boxes}) for d in range(src.ndim)
        ]
        self.empty = not boxes

    def overlapping(self, target: Box) -> Iterator[Box]:
        """The cells that have elements in ``target``, in order."""
        if self.empty or not target.numel:
            return
        hits = [
            [(a, n) for a, n in row if a < start + size and start < a + n]
            for row, start, size in zip(self.intervals, *target, strict=True)
        ]
        for cell in itertools.product(*hits):
            yield Box(tuple(a for a, _ in cell), tuple(n for _, n in cell))
