"""P(op) -> R: one all_reduce over all axes that wait for the same reduction."""

from __future__ import annotations

from typing import Any

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.core.placement import Partial, Replicate
from disttensor.core.spec import DistSpec
from reshard.registry import NOW, Axes, How, Tensor, ready, register


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
