"""S(d) -> R: one all_gather, over several axes and of several dims at once."""

from __future__ import annotations

import math

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.placement import Replicate, Shard
from disttensor.spec import DistSpec
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import Axes, Tensor, register


@cached(4096)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> tuple[PieceGrid, bool]:
    """How pieces make the whole; and whether uneven ones only need to be joined, because just the
    last ones are short."""
    return piece_grid(src, dst, axes), len(axes) == 1 and src.layout.dim_of(axes[0]) == 0


@register(Shard, Replicate, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * src_bytes)
def all_gather(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8@dp, 6@tp]`` to ``f32[8, 6]``. Uneven pieces are padded, on the wire only."""
    grid, in_rows = plan(src, dst, axes)
    if grid.padded is None:
        if grid.order is None:
            return collectives.all_gather(x, grid.group, grid.shape)
        stacked = collectives.all_gather(x, grid.group, grid.stacked)
        return stacked.permute(grid.order).reshape(grid.shape).contiguous()
    if not grid.padded:
        return x.new_empty(grid.shape)
    flat = x.reshape(-1)
    if len(flat) < grid.padded:
        flat = x.new_zeros(grid.padded)
        flat[: x.numel()] = x.reshape(-1)
    gathered = collectives.all_gather(flat, grid.group)
    if in_rows:
        return gathered.view(-1)[: math.prod(grid.shape)].view(grid.shape)
    return grid.join(gathered)
