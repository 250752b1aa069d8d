"""P(op) -> R by one all_reduce over all axes that wait for the same reduction; P(op) -> S(d) by one
reduce_scatter, over several axes and to several dims at once."""

from __future__ import annotations

import math
from typing import Any

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.comm.process_group import backend_name
from disttensor.comm.work import finished
from disttensor.core.placement import Partial, Replicate, Shard
from disttensor.core.spec import DistSpec
from reshard.piece_grid import PieceGrid, piece_grid
from reshard.registry import NOW, Axes, How, Tensor, ready, register, then


def ring(src_bytes: int, dst_bytes: int, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * src_bytes


@cached(4096)
def pending(spec: DistSpec, axes: Axes) -> str:
    """Returns the reduction that is pending on ``axes``, the same on all of them."""
    return next(op for axis, op in spec.layout.partial if axis == axes[0])


@register(Partial, Replicate, cost=ring)
def all_reduce(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes, how: How = NOW) -> Any:
    """Reduces ``f32[8] {dp: P(sum)}`` to ``f32[8]``; any reduction, and ``avg`` divides by the
    ranks. It always reduces a copy."""
    if not x.numel():  # then it is empty on every rank of the group
        return ready(x, how)
    return how.run(collectives.all_reduce, x, pending(src, axes), src.mesh.group(axes))


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
