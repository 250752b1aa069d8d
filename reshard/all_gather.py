"""S(d) -> R: one all_gather, over several axes and of several dims at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.layout import Box
from disttensor.placement import Replicate, Shard
from disttensor.spec import DistSpec
from reshard.registry import Axes, Tensor, register


@dataclass(frozen=True, slots=True)
class Joining:
    """How the pieces of a group, stacked by an all_gather, make the whole.

    Even pieces: ``grid`` shape, then ``perm`` (None: they are in order already), then ``shape``.
    Uneven pieces travel flat, padded to ``padded`` elements, and each goes to its box in ``whole``;
    ``inline`` means that they only need to be joined, because just the last ones are short.
    """

    group: collectives.Group
    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()
    perm: tuple[int, ...] | None = None
    padded: int | None = None
    whole: Box | None = None
    boxes: tuple[Box, ...] = ()
    inline: bool = False


def grid_of(
    piece: DistSpec, whole: DistSpec, axes: Axes
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape, permutation) from [one number per axis, *piece] to the whole; None for uneven pieces.

    ``whole`` is ``piece`` with ``axes`` removed from its dims (they are the minor ones there).
    """
    perm: list[int] = []
    for d, own in enumerate(piece.layout.dims):
        joined = [axes.index(a) for a in own if a in axes]
        ranks = math.prod(piece.mesh.shape[axes[i]] for i in joined)
        if piece.local_shape[d] * ranks != whole.local_shape[d]:
            return None
        perm += [*joined, len(axes) + d]
    return (*(piece.mesh.shape[a] for a in axes), *piece.local_shape), tuple(perm)


@cached(4096)
def joining(src: DistSpec, dst: DistSpec, axes: Axes) -> Joining:
    group, mesh = src.mesh.group(axes), src.mesh
    even = grid_of(src, dst, axes)
    if even:
        grid, perm = even
        in_order = perm == tuple(range(len(grid)))
        return Joining(group, dst.local_shape, grid, None if in_order else perm)
    assert mesh.coordinate is not None
    places = mesh.members(axes, mesh.coordinate)
    boxes = tuple(src.box_at(place) for place in places)
    return Joining(
        group,
        dst.local_shape,
        padded=max(box.numel for box in boxes),
        whole=dst.box_at(mesh.coordinate),
        boxes=boxes,
        inline=len(axes) == 1 and src.layout.dim_of(axes[0]) == 0,
    )


@register(Shard, Replicate, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * src_bytes)
def all_gather(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """``f32[8@dp, 6@tp]`` to ``f32[8, 6]``. Uneven pieces are padded, on the wire only."""
    how = joining(src, dst, axes)
    if how.padded is None:
        if how.perm is None:
            return collectives.all_gather(x, how.group, how.shape)
        grid = collectives.all_gather(x, how.group, how.grid)
        return grid.permute(how.perm).reshape(how.shape).contiguous()
    if not how.padded:
        return x.new_empty(how.shape)
    flat = x.reshape(-1)
    if len(flat) < how.padded:
        flat = x.new_zeros(how.padded)
        flat[: x.numel()] = x.reshape(-1)
    gathered = collectives.all_gather(flat, how.group)
    if how.inline:
        return gathered.view(-1)[: math.prod(how.shape)].view(how.shape)
    assert how.whole is not None
    out = x.new_empty(how.shape)
    for piece, box in zip(gathered, how.boxes, strict=True):
        if box.numel:
            box.cut(out, how.whole).copy_(piece[: box.numel].view(box.shape))
    return out
