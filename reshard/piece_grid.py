"""The positions of a group's pieces in the global tensor: an all_gather joins them, a
reduce_scatter splits them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disttensor.comm.groups import Group
from disttensor.core.layout import Box, Shape
from disttensor.core.spec import DistSpec
from reshard.registry import Axes, Tensor


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """Pieces in the order of the group, and the tensor that they form (``shape``).

    Equal pieces, ``stacked`` as [ranks of each axis, *piece], become the joined tensor by the
    permutation ``order`` (None: they are in order already); ``unstacked`` is this tensor before its
    permutation ``back``. Pieces of different ``boxes`` are sent flat, padded to ``padded``.
    """

    group: Group
    shape: Shape
    stacked: Shape = ()
    order: tuple[int, ...] | None = None
    unstacked: Shape = ()
    back: tuple[int, ...] | None = None
    padded: int | None = None
    whole: Box | None = None
    boxes: tuple[Box, ...] = ()

    def join(self, pieces: Tensor, out: Tensor | None = None) -> Tensor:
        """Joins padded pieces [ranks, padded] to the global tensor, or into ``out``."""
        assert self.whole is not None
        out = pieces.new_empty(self.shape) if out is None else out
        for piece, box in zip(pieces, self.boxes, strict=True):
            if box.numel:
                box.cut(out, self.whole).copy_(piece[: box.numel].view(box.shape))
        return out

    def cut(self, whole: Tensor) -> Tensor:
        """Splits the global tensor to [ranks, padded]."""
        assert self.whole is not None and self.padded is not None
        out = whole.new_zeros(len(self.boxes), self.padded)
        for piece, box in zip(out, self.boxes, strict=True):
            if box.numel:
                piece[: box.numel].view(box.shape).copy_(box.cut(whole, self.whole))
        return out


def piece_grid(piece: DistSpec, whole: DistSpec, axes: Axes) -> PieceGrid:
    """Returns the grid of pieces. ``whole`` is ``piece`` with ``axes``, the minor ones there,
    removed from its dims."""
    mesh, group, shape = piece.mesh, piece.mesh.group(axes), whole.local_shape
    sizes, order = tuple(mesh.shape[a] for a in axes), list[int]()
    for d, splits in enumerate(piece.layout.dims):
        here = [axes.index(a) for a in splits if a in axes]
        if piece.local_shape[d] * math.prod(sizes[i] for i in here) != shape[d]:
            break
        order += [*here, len(axes) + d]
    else:
        stacked = (*sizes, *piece.local_shape)
        unstacked = tuple(stacked[i] for i in order)
        if order == sorted(order):
            return PieceGrid(group, shape, stacked, None, unstacked)
        back = tuple(order.index(i) for i in range(len(order)))
        return PieceGrid(group, shape, stacked, tuple(order), unstacked, back)
    assert mesh.coordinate is not None
    boxes = tuple(piece.box_at(place) for place in mesh.members(axes, mesh.coordinate))
    padded = max(box.numel for box in boxes)
    return PieceGrid(group, shape, padded=padded, whole=whole.local_box, boxes=boxes)
