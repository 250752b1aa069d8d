"""P(op) -> S(d): one reduce_scatter, over several axes and to several dims at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.layout import Box
from disttensor.placement import Partial, Shard
from disttensor.spec import DistSpec
from reshard.all_gather import grid_of
from reshard.all_reduce import pending
from reshard.registry import Axes, Tensor, register


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a local is cut into the pieces of a group: Joining (all_gather.py) read backwards."""

    group: collectives.Group
    op: str
    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()
    perm: tuple[int, ...] | None = None
    padded: int | None = None
    whole: Box | None = None
    boxes: tuple[Box, ...] = ()


@cached(4096)
def cutting(src: DistSpec, dst: DistSpec, axes: Axes) -> Cutting:
    group, op, mesh = src.mesh.group(axes), pending(src, axes), src.mesh
    even = grid_of(dst, src, axes)
    if even:
        grid, perm = even
        wide = tuple(grid[i] for i in perm)
        back = tuple(perm.index(i) for i in range(len(perm)))
        in_order = back == tuple(range(len(back)))
        return Cutting(group, op, dst.local_shape, wide, None if in_order else back)
    assert mesh.coordinate is not None
    places = mesh.members(axes, mesh.coordinate)
    boxes = tuple(dst.box_at(place) for place in places)
    return Cutting(
        group,
        op,
        dst.local_shape,
        padded=max(box.numel for box in boxes),
        whole=src.box_at(mesh.coordinate),
        boxes=boxes,
    )


@register(Partial, Shard, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * dst_bytes)
def reduce_scatter(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8, 6] {dp: P(sum)}`` to ``f32[8@dp, 6]``. Half the bytes of an all_reduce."""
    how = cutting(src, dst, axes)
    if not x.numel():
        return x.new_empty(how.shape)
    if how.padded is None:
        if how.perm is not None:
            x = x.reshape(how.grid).permute(how.perm)
        return collectives.reduce_scatter(x, how.op, how.group, how.shape)
    assert how.whole is not None
    pieces = x.new_zeros(how.group.size, how.padded)
    for piece, box in zip(pieces, how.boxes, strict=True):
        if box.numel:
            piece[: box.numel].view(box.shape).copy_(box.cut(x, how.whole))
    out = collectives.reduce_scatter(pieces, how.op, how.group)
    return out[: math.prod(how.shape)].view(how.shape)
