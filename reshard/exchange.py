"""Any layout of S and R to any other in one all_to_all: each rank gets just what it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.work import Work
from disttensor.core.layout import Axes as DimAxes
from disttensor.core.layout import Box
from disttensor.core.spec import DistSpec
from reshard.registry import Axes, Tensor
from reshard.routing import Message, within


@dataclass(frozen=True, slots=True)
class Exchange:
    """The plan of this rank: the boxes that it sends (one for each member of the group, or None),
    keeps and receives (``numels``: elements per member)."""

    group: collectives.Group
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


def exchange(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8@dp+tp]`` to ``f32[8@tp+dp]``, and every other change between layouts of S and R."""
    how = plan(src, dst, axes)
    got = collectives.all_to_all(_pieces(x, how), how.numels, how.group)
    return _received(_kept(x, dst, how), how, got)


def start_exchange(
    x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, apart: bool
) -> Work[Tensor]:
    """Starts ``exchange`` in the background."""
    how = plan(src, dst, axes)
    pieces, out = _pieces(x, how), _kept(x, dst, how)
    if apart and sum(box is not None for box in how.sent) == 1:  # several are copied into one
        pieces = [piece.clone() for piece in pieces]
    work = collectives.all_to_all(pieces, how.numels, how.group, async_op=True)
    return Work(lambda: _received(out, how, work.wait()), work.done, out)


def _pieces(x: Tensor, how: Exchange) -> list[Tensor]:
    none = x.new_empty(0)
    return [box.cut(x, how.source) if box else none for box in how.sent]


def _kept(x: Tensor, dst: DistSpec, how: Exchange) -> Tensor:
    out = x.new_empty(dst.local_shape)
    if how.kept:
        how.kept.cut(out, how.target).copy_(how.kept.cut(x, how.source))
    return out


def _received(out: Tensor, how: Exchange, got: list[Tensor]) -> Tensor:
    for i, box in how.received:
        box.cut(out, how.target).copy_(got[i].view(box.shape))
    return out
