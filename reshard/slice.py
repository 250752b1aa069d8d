"""R -> S(d): each rank keeps its piece. Local, and a view: it costs nothing."""

from __future__ import annotations

from disttensor.cache import cached
from disttensor.placement import Replicate, Shard
from disttensor.spec import DistSpec
from reshard.box import Box, cut
from reshard.registry import Axes, Tensor, register


@cached(4096)
def boxes(src: DistSpec, dst: DistSpec) -> tuple[Box, Box]:
    return (src.local_offset, src.local_shape), (dst.local_offset, dst.local_shape)


@register(Replicate, Shard, kind="slice")
def keep_piece(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8, 6]`` to ``f32[8@dp, 6]``: a view of x, without communication."""
    return cut(x, *boxes(src, dst))
