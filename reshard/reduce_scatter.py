"""P(op) -> S(d): one reduce_scatter, over several axes and to several dims at once."""

from __future__ import annotations

import math

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.process_group import backend_name
from disttensor.comm.work import Work, finished
from disttensor.core.placement import Partial, Shard
from disttensor.core.spec import DistSpec
from reshard.all_reduce import pending
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import Axes, Tensor, register, starts


@cached(4096)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> tuple[str, PieceGrid]:
    return pending(src, axes), piece_grid(dst, src, axes)


@register(Partial, Shard, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * dst_bytes)
def reduce_scatter(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8, 6] {dp: P(sum)}`` to ``f32[8@dp, 6]``. Half the bytes of an all_reduce."""
    op, grid = plan(src, dst, axes)
    shape = dst.local_shape
    if not x.numel():
        return x.new_empty(shape)
    if grid.padded is None:
        if grid.back is not None:
            x = x.reshape(grid.unstacked).permute(grid.back)
        return collectives.reduce_scatter(x, op, grid.group, shape)
    out = collectives.reduce_scatter(grid.cut(x), op, grid.group)
    return out[: math.prod(shape)].view(shape)


def start(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, apart: bool) -> Work[Tensor]:
    op, grid = plan(src, dst, axes)
    shape = dst.local_shape
    if not x.numel():
        return finished(x.new_empty(shape))
    # over gloo it is another one in the background, which adds up in another order
    if apart and backend_name(grid.group.pg, x.device) == "gloo":
        return finished(reduce_scatter(x, src, dst, axes))
    if grid.padded is None:
        if grid.back is not None:
            x = x.reshape(grid.unstacked).permute(grid.back)
        if apart and x.is_contiguous():  # else it is copied on the way
            x = x.clone()
        return collectives.reduce_scatter(x, op, grid.group, shape, async_op=True)
    work = collectives.reduce_scatter(grid.cut(x), op, grid.group, async_op=True)

    def cut(out: Tensor) -> Tensor:
        return out[: math.prod(shape)].view(shape)

    into = None if work.into is None else cut(work.into)
    return Work(lambda: cut(work.wait()), work.done, into)


starts[reduce_scatter] = start
