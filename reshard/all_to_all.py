"""S(i) -> S(j): one all_to_all; each rank sends every other the part that it will hold."""

from __future__ import annotations

from typing import NamedTuple

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.work import Work
from disttensor.core.placement import Shard
from disttensor.core.spec import DistSpec
from reshard.exchange import exchange, start_exchange
from reshard.registry import Axes, Tensor, register, starts


class Even(NamedTuple):
    """Equal pieces: dim j of the local is cut into ``split``, the pieces are joined along dim i."""

    group: collectives.Group
    split: tuple[int, ...]
    i: int
    j: int
    shape: tuple[int, ...]


@cached(4096)
def even(src: DistSpec, dst: DistSpec, axes: Axes) -> Even | None:
    """Returns how even pieces are exchanged; None for uneven pieces or axes in another order."""
    i, j = src.layout.dim_of(axes[0]), dst.layout.dim_of(axes[0])
    assert i is not None and j is not None
    if src.layout.dims[i][-len(axes) :] != axes:
        return None
    before, after, group = src.local_shape, dst.local_shape, src.mesh.group(axes)
    if before[i] * group.size != after[i] or after[j] * group.size != before[j]:
        return None
    return Even(group, (*before[:j], group.size, after[j], *before[j + 1 :]), i, j, after)


@register(Shard, Shard, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) / ranks * src_bytes)
def all_to_all(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8@dp, 6]`` to ``f32[8, 6@dp]``. Uneven and empty pieces are sent as they are."""
    how = even(src, dst, axes)
    if how is None:
        return exchange(x, src, dst, axes)
    pieces = collectives.all_to_all_even(x.reshape(how.split).movedim(how.j, 0), how.group)
    return pieces.movedim(0, how.i).reshape(how.shape).contiguous()


def start(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, apart: bool) -> Work[Tensor]:
    how = even(src, dst, axes)
    if how is None:
        return start_exchange(x, src, dst, axes, apart)
    given, out = x.reshape(how.split).movedim(how.j, 0), x.new_empty(how.shape)
    if apart and given.is_contiguous():  # else it is copied on the way
        given = given.clone()
    work = collectives.all_to_all_even(given, how.group, async_op=True)

    def finish() -> Tensor:
        pieces = work.wait().movedim(0, how.i)
        out.view(pieces.shape).copy_(pieces)
        return out

    return Work(finish, work.done, out)


starts[all_to_all] = start
