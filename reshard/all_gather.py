"""S(d) -> R: one all_gather, over several axes and of several dims at once."""

from __future__ import annotations

import math

import torch

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.work import Work, finished
from disttensor.core.placement import Replicate, Shard
from disttensor.core.spec import DistSpec
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import Axes, Tensor, register, starts


@cached(4096)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> tuple[PieceGrid, bool]:
    """Returns how pieces form the global tensor, and whether uneven pieces only need to be joined,
    because only the last ones are short."""
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
    gathered = collectives.all_gather(flattened(x, grid.padded), grid.group)
    return rows(gathered, grid) if in_rows else grid.join(gathered)


def flattened(x: Tensor, padded: int) -> Tensor:
    flat = x.reshape(-1)
    if len(flat) < padded:
        flat = x.new_zeros(padded)
        flat[: x.numel()] = x.reshape(-1)
    return flat


def rows(gathered: Tensor, grid: PieceGrid) -> Tensor:
    return gathered.view(-1)[: math.prod(grid.shape)].view(grid.shape)


def start(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, apart: bool) -> Work[Tensor]:
    grid, in_rows = plan(src, dst, axes)
    if apart:
        x = x.clone(memory_format=torch.contiguous_format)
    if grid.padded is None and grid.order is None:
        return collectives.all_gather(x, grid.group, grid.shape, async_op=True)
    if grid.padded == 0:
        return finished(x.new_empty(grid.shape))
    if grid.padded is not None:
        x = flattened(x, grid.padded)
    work = collectives.all_gather(x, grid.group, grid.stacked or None, async_op=True)
    if in_rows and work.into is not None:
        return Work(lambda: rows(work.wait(), grid), work.done, rows(work.into, grid))
    whole = x.new_empty(grid.shape)

    def finish() -> Tensor:
        gathered = work.wait()
        if grid.order is None:
            return grid.join(gathered, whole)
        stacked = gathered.permute(grid.order)
        whole.view(stacked.shape).copy_(stacked)
        return whole

    return Work(finish, work.done, whole)


starts[all_gather] = start
