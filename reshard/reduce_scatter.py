"""P(op) -> S(d): one reduce_scatter, over several axes and to several dims at once."""

from __future__ import annotations

import math
from typing import Any

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.process_group import backend_name
from disttensor.comm.work import finished
from disttensor.core.placement import Partial, Shard
from disttensor.core.spec import DistSpec
from reshard.all_reduce import pending
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import NOW, Axes, How, Tensor, ready, register, then


@cached(4096)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> tuple[str, PieceGrid]:
    return pending(src, axes), piece_grid(dst, src, axes)


@register(Partial, Shard, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * dst_bytes)
def reduce_scatter(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, how: How = NOW) -> Any:
    """Reduces ``f32[8, 6] {dp: P(sum)}`` to ``f32[8@dp, 6]``. Half the bytes of an all_reduce."""
    op, grid = plan(src, dst, axes)
    shape = dst.local_shape
    if not x.numel():
        return ready(x.new_empty(shape), how)
    # over gloo a background call is another algorithm, which adds up in another order
    if how.copies and backend_name(grid.group.pg, x.device) == "gloo":
        return finished(reduce_scatter(x, src, dst, axes))
    if grid.padded is None:
        if grid.back is not None:
            x = x.reshape(grid.unstacked).permute(grid.back)
        if how.copies and x.is_contiguous():  # otherwise the collective copies it
            x = x.clone()
        return how.run(collectives.reduce_scatter, x, op, grid.group, shape)
    out = how.run(collectives.reduce_scatter, grid.cut(x), op, grid.group)
    return then(out, lambda piece: piece[: math.prod(shape)].view(shape))
