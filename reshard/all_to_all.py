"""One all_to_all: from S(i) to S(j), where each rank sends every other the part that it will hold;
and from any layout of S and R to any other, where each rank receives only what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.core.layout import Axes as DimAxes
from disttensor.core.layout import Box
from disttensor.core.placement import Shard
from disttensor.core.spec import DistSpec
from reshard.registry import NOW, Axes, How, Tensor, dense, register, then
from reshard.routing import Message, within


class EvenSplit(NamedTuple):
    """Equal pieces: dim j of the local is cut into ``sizes``, the pieces are joined along dim i."""

    group: Group
    sizes: tuple[int, ...]
    i: int
    j: int
    shape: tuple[int, ...]


@cached(4096)
def even(src: DistSpec, dst: DistSpec, axes: Axes) -> EvenSplit | None:
    """Returns how even pieces are exchanged; None for uneven pieces or axes in another order."""
    i, j = src.layout.dim_of(axes[0]), dst.layout.dim_of(axes[0])
    assert i is not None and j is not None
    if src.layout.dims[i][-len(axes) :] != axes:
        return None
    before, after, group = src.local_shape, dst.local_shape, src.mesh.group(axes)
    if before[i] * group.size != after[i] or after[j] * group.size != before[j]:
        return None
    return EvenSplit(group, (*before[:j], group.size, after[j], *before[j + 1 :]), i, j, after)


@register(Shard, Shard, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) / ranks * src_bytes)
def all_to_all(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, how: How = NOW) -> Any:
    """Exchanges ``f32[8@dp, 6]`` for ``f32[8, 6@dp]``. Uneven and empty pieces are sent
    unpadded."""
    split = even(src, dst, axes)
    if split is None:
        return exchange(x, src, dst, axes, how)
    given = x.reshape(split.sizes).movedim(split.j, 0)
    out = x.new_empty(split.shape) if how.async_op else None
    if how.copies and given.is_contiguous():  # otherwise the collective copies it
        given = given.clone()

    def joined(pieces: Tensor) -> Tensor:
        return dense(pieces.movedim(0, split.i), split.shape, out)

    return then(how.run(collectives.all_to_all_rows, given, (), (), split.group), joined, out)


# Any layouts --------------------------------------------------------------------------------------


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
