"""R -> S(d): each rank keeps its piece. Local, and a view: it costs nothing."""

from __future__ import annotations

from disttensor.core.placement import Replicate, Shard
from disttensor.core.spec import DistSpec
from reshard.registry import Axes, Tensor, register


@register(Replicate, Shard, kind="slice")
def keep_piece(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Cuts ``f32[8, 6]`` to ``f32[8@dp, 6]``: a view of x, without communication."""
    return dst.local_box.cut(x, src.local_box)
