"""Any layout of S and R to any other in one all_to_all: each rank gets just what it lacks.

The pieces follow from the two specs alone. The locals of the source cut the tensor into cells; a
receiver needs the part of each cell that lies in its target box. What it holds itself it copies;
every other part comes from one rank that holds the cell: the one that differs from the receiver on
the fewest axes, and of several the next one after it, so that senders share the work.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.layout import Axes as DimAxes
from disttensor.layout import Box
from disttensor.spec import DistSpec
from reshard.registry import Axes, Tensor

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """What this rank sends and receives: a box per member of the group, None for nothing."""

    group: collectives.Group
    source: Box
    target: Box
    kept: Box | None
    sent: tuple[Box | None, ...]
    received: tuple[Box | None, ...]
    numels: tuple[int, ...]


def concerned(src: tuple[DimAxes, ...], dst: tuple[DimAxes, ...]) -> Axes:
    """The axes over which an exchange communicates: those behind the common major ones of a dim."""
    axes: set[int] = set()
    for before, after in zip(src, dst, strict=True):
        same = common(before, after)
        axes.update(before[same:], after[same:])
    return tuple(sorted(axes))


def common(a: DimAxes, b: DimAxes) -> int:
    """How many leading entries are equal."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@cached(1024)
def routes(src: DistSpec, dst: DistSpec, axes: Axes) -> Routes:
    mesh = src.mesh
    group = mesh.group(axes)
    assert mesh.coordinate is not None
    me = mesh.coordinate
    places = mesh.members(axes, me)
    split = [a for a in axes if a in src.layout.sharded]
    holders: dict[Place, list[Place]] = {}
    for place in places:
        holders.setdefault(tuple(place[a] for a in split), []).append(place)

    def sender(receiver: Place, cell: Place) -> Place:
        def distance(holder: Place) -> tuple[int, Place]:
            steps = tuple((holder[a] - receiver[a]) % mesh.shape[a] for a in axes)
            return sum(s > 0 for s in steps), steps

        return min(holders[cell], key=distance)

    index = {place: i for i, place in enumerate(places)}
    source, target = src.box_at(me), dst.box_at(me)
    mine = tuple(me[a] for a in split)
    sent: list[Box | None] = [None] * len(places)
    received: list[Box | None] = [None] * len(places)
    for receiver in places:
        piece = source.intersect(dst.box_at(receiver))
        if piece and receiver != me and sender(receiver, mine) == me:
            sent[index[receiver]] = piece
    for cell, ranks in holders.items():
        piece = src.box_at(ranks[0]).intersect(target) if cell != mine else None
        if piece:
            received[index[sender(me, cell)]] = piece
    numels = tuple(box.numel if box else 0 for box in received)
    kept = source.intersect(target)
    return Routes(group, source, target, kept, tuple(sent), tuple(received), numels)


def exchange(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8@dp+tp]`` to ``f32[8@tp+dp]``, and every other change between layouts of S and R."""
    how = routes(src, dst, axes)
    none = x.new_empty(0)
    pieces = [box.cut(x, how.source) if box else none for box in how.sent]
    got = collectives.all_to_all(pieces, how.numels, how.group)
    out = x.new_empty(dst.local_shape)
    if how.kept:
        how.kept.cut(out, how.target).copy_(how.kept.cut(x, how.source))
    for piece, box in zip(got, how.received, strict=True):
        if box:
            box.cut(out, how.target).copy_(piece.view(box.shape))
    return out
