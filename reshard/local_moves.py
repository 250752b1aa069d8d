"""Moves without communication. R -> S(d): each rank keeps its piece, a view. R -> P(op) and S(d) ->
P(op): elements that a rank does not hold become the neutral element of op."""

from __future__ import annotations

import torch

from disttensor.core.placement import Partial, Replicate, Shard, neutral_element
from disttensor.core.spec import DistSpec
from reshard.reductions import pending
from reshard.registry import Axes, Tensor, register


@register(Replicate, Shard, kind="slice")
def keep_piece(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Cuts ``f32[8, 6]`` to ``f32[8@dp, 6]``: a view of x, without communication."""
    return dst.local_box.cut(x, src.local_box)


@register(Replicate, Partial, kind="to_partial")
def keep_once(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Turns ``f32[8]`` into ``f32[8] {dp: P(sum)}``: for sum and prod the first rank of the axes
    keeps x.

    For the other reductions, which may count a value several times, all ranks keep x.
    """
    op, place = pending(dst, axes), src.mesh.coordinate
    if op not in ("sum", "prod") or place is None:
        return x
    if not any(place[a] for a in axes):
        return x.clone()  # as on the other ranks, which do not return x itself
    return torch.full_like(x, neutral_element(op, x.dtype), memory_format=torch.contiguous_format)


@register(Shard, Partial, kind="to_partial")
def pad_with_neutral(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Turns ``f32[8@dp]`` into ``f32[8] {dp: P(sum)}``: x at its place in a tensor of neutral
    elements. Not for avg: a piece is gathered first."""
    op = pending(dst, axes)
    out = x.new_full(dst.local_shape, neutral_element(op, x.dtype))
    piece = src.local_box.cut(out, dst.local_box)
    piece.copy_(x)
    return out
