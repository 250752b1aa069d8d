"""S(i) -> S(j): one all_to_all; each rank sends every other the part that it will hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.core.placement import Shard
from disttensor.core.spec import DistSpec
from reshard.exchange import exchange
from reshard.registry import NOW, Axes, How, Tensor, dense, register, then


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
