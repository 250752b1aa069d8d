"""Any layout of S and R to any other in one all_to_all: each rank receives only the elements that
it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.core.layout import Axes as DimAxes
from disttensor.core.layout import Box
from disttensor.core.spec import DistSpec
from reshard.registry import NOW, Axes, How, Tensor, then
from reshard.routing import Message, within


@dataclass(frozen=True, slots=True)
class Exchange:
    """The plan of this rank: the boxes that it sends (one for each member of the group, or None),
    keeps and receives (``numels``: elements per member)."""

    group: Group
    source: Box
    target: Box
    kept: Box | None
    sent: tuple[Box | None, ...]
    received: tuple[Message, ...]
    numels: tuple[int, ...]


def concerned(src: tuple[DimAxes, ...], dst: tuple[DimAxes, ...]) -> Axes:
    """Returns the axes of an exchange: the axes after the common major axes of a dim."""
    axes: set[int] = set()
    for before, after in zip(src, dst, strict=True):
        same = common(before, after)
        axes.update(before[same:], after[same:])
    return tuple(sorted(axes))


def common(a: DimAxes, b: DimAxes) -> int:
    """Returns how many leading entries are equal."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@cached(1024)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> Exchange:
    group, routes = src.mesh.group(axes), within(src, dst, axes)
    sends, receives = dict(routes.sends), dict(routes.receives)
    sent = tuple(sends.get(i) for i in range(group.size))
    numels = tuple(receives[i].numel if i in receives else 0 for i in range(group.size))
    return Exchange(group, src.local_box, dst.local_box, routes.kept, sent, routes.receives, numels)


def exchange(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, how: How = NOW) -> Any:
    """Changes ``f32[8@dp+tp]`` to ``f32[8@tp+dp]``, and between all other layouts of S and R."""
    route, none, out = plan(src, dst, axes), x.new_empty(0), x.new_empty(dst.local_shape)
    pieces = [box.cut(x, route.source) if box else none for box in route.sent]
    if route.kept:
        route.kept.cut(out, route.target).copy_(route.kept.cut(x, route.source))
    # several pieces are copied into one
    if how.copies and sum(box is not None for box in route.sent) == 1:
        pieces = [piece.clone() for piece in pieces]

    def received(got: list[Tensor]) -> Tensor:
        for i, box in route.received:
            box.cut(out, route.target).copy_(got[i].view(box.shape))
        return out

    given = how.run(collectives.all_to_all, pieces, route.numels, route.group)
    return then(given, received, out)
