"""S(d) -> R: one all_gather, over several axes and of several dims at once."""

from __future__ import annotations

import math
from typing import Any

import torch

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.core.placement import Replicate, Shard
from disttensor.core.spec import DistSpec
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import NOW, Axes, How, Tensor, dense, ready, register, then


@cached(4096)
def plan(src: DistSpec, dst: DistSpec, axes: Axes) -> tuple[PieceGrid, bool]:
    """Returns how pieces form the global tensor, and whether uneven pieces only need to be joined,
    because only the last ones are short."""
    return piece_grid(src, dst, axes), len(axes) == 1 and src.layout.dim_of(axes[0]) == 0


@register(Shard, Replicate, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * src_bytes)
def all_gather(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, how: How = NOW) -> Any:
    """Gathers ``f32[8@dp, 6@tp]`` to ``f32[8, 6]``. Uneven pieces are padded, on the wire only."""
    grid, in_rows = plan(src, dst, axes)
    if how.copies:
        x = x.clone(memory_format=torch.contiguous_format)
    if grid.padded is None and grid.order is None:
        return how.run(collectives.all_gather, x, grid.group, grid.shape)
    if grid.padded == 0:
        return ready(x.new_empty(grid.shape), how)
    if grid.padded is not None:
        x = flattened(x, grid.padded)
    gathered = how.run(collectives.all_gather, x, grid.group, grid.stacked or None)
    if in_rows:
        numel = math.prod(grid.shape)
        return then(gathered, lambda pieces: pieces.view(-1)[:numel].view(grid.shape))
    whole = x.new_empty(grid.shape) if how.async_op else None

    def joined(pieces: Tensor) -> Tensor:
        if grid.order is None:
            return grid.join(pieces, whole)
        return dense(pieces.permute(grid.order), grid.shape, whole)

    return then(gathered, joined, whole)


def flattened(x: Tensor, padded: int) -> Tensor:
    flat = x.reshape(-1)
    if len(flat) < padded:
        flat = x.new_zeros(padded)
        flat[: x.numel()] = x.reshape(-1)
    return flat
