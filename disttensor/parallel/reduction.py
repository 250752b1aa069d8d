"""The gradients of one segment, reduced: contributions on the twins become gradients of the parameters.

    twin {dp: P, fsdp: P}  --reduce-scatter over fsdp-->  shard {dp: P}  --all-reduce over dp-->  shard

One flat collective for all parameters that wait on the same axes. Each step is a generator: what it yields is under way, and
it is resumed when that has arrived, so that several reductions and the rest of the backward overlap.

A row ends with one number per parameter: how many ranks bring a gradient. Where that is none, the parameter gets none
(as in one process), though every rank took part; what a rank sends never depends on what it has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Sequence

import torch

from disttensor import comm
from disttensor.layout import Axes
from disttensor.parallel.rows import Rows
from disttensor.parallel.twin import Twin, piece_of

Tensor = torch.Tensor
Steps = Generator[comm.Pending, None, None]
_NOTHING = comm.Pending("", comm.Group((0,), 0, (), None), None, None)


def reductions(
    twins: Sequence[Twin], *, scatter: bool, last: bool, dtype: torch.dtype | None
) -> list[Steps]:
    """What reduces the gradients of these twins, one generator for each set of axes.

    scatter  reduce to shards where the parameter is one (stages 2 and 3), else whole gradients, and then cut
    last     also over the axes that do not cut the parameter; else its gradient stays Partial there
    dtype    of the sums on the wire; None: that of the gradients
    """
    kinds: dict[tuple[Axes, int | None, torch.dtype, bool], list[Twin]] = {}
    for twin in twins:
        if twin.held.requires_grad:
            key = (twin.axes(), twin.axis, twin.spec.dtype, twin.even)
            kinds.setdefault(key, []).append(twin)
    out = []
    for (axes, axis, of, _), members in kinds.items():
        wire = dtype or of
        if not axes:
            _settle(members)
        elif axis is not None and scatter:
            out.append(_to_shards(members, axes, axis, last, wire))
        elif last:
            out.append(_whole(members, axes, wire))
    return out


def _settle(twins: Sequence[Twin]) -> None:
    """Nothing to communicate: gradients that are whole on every rank."""
    for twin in twins:
        _, complete = twin.take()
        if complete is not None:
            twin.give(piece_of(twin, complete), ())


def _taken(twins: Sequence[Twin]) -> tuple[list[Tensor], list[float]]:
    """The contributions of this rank, zeros where it has none, and which it has."""
    grads, present = [], []
    for twin in twins:
        pending, complete = twin.take()
        if complete is not None:
            twin.give(piece_of(twin, complete), ())
        present.append(0.0 if pending is None else 1.0)
        if pending is None:
            pending = torch.zeros(
                twin.spec.local_shape, dtype=twin.spec.dtype, device=twin.held.device
            )
        grads.append(pending)
    if len({g.dtype for g in grads}) > 1:  # some are kept in the dtype of the parameter
        wide = functools.reduce(torch.promote_types, (g.dtype for g in grads))
        grads = [g.to(wide) for g in grads]
    return grads, present


@torch.no_grad()
def _to_shards(
    twins: Sequence[Twin], axes: Axes, axis: int, last: bool, dtype: torch.dtype
) -> Steps:
    """Over ``axis`` to shards first, then over all other axes at once.

    In fp16 what lies between the two is smaller by the factor for all ranks: a sum over the shards alone may be large on its
    way to a small one. It grows again in the dtype of the parameter.
    """
    mesh = twins[0].spec.mesh
    coordinate = mesh.coordinate or ()
    rows = Rows([t.spec.local_shape for t in twins], mesh.shape[axis])
    grads, present = _taken(twins)
    rest = tuple(a for a in axes if a != axis)
    # All ranks come here in one order. What follows a yield has an order of its own, and so another lane.
    replicas = mesh.group(rest, "replicas") if rest and last else None
    less, more = 1.0, 1.0
    if axis in axes and rest:
        less, more = comm.factors("sum", math.prod(mesh.shape[a] for a in axes), dtype)
    if axis in axes:
        wire = rows.packed(grads, present, dtype)
        if less != 1:
            wire.mul_(less)
        row = wire.new_empty(wire.shape[1])
        del grads
        pending = comm.start_reduce_scatter(
            wire.view(-1), row, "sum", mesh.group((axis,), "reduce")
        )
        del wire
        yield pending
    else:  # whole over the axis already
        index = coordinate[axis]
        pieces = [rows.piece(j, g, index) for j, g in enumerate(grads)]
        row = torch.cat([rows.joined(pieces, dtype), grads[0].new_tensor(present, dtype=dtype)])
        del grads
        yield _NOTHING  # so that what follows is in one order with that of those that had something to do
    pieces = rows.pieces(row[: rows.total], coordinate[axis])
    counts = row[rows.total :]
    if replicas is not None:
        for i, twin in enumerate(twins):
            earlier = twin.stashed(rest)
            if earlier is not None:
                pieces[i].add_(earlier, alpha=less)
                counts[i] += 1
        yield comm.start_all_reduce(row, "sum", replicas)
        rest = ()
    if more != 1:
        pieces = [
            p.to(t.held.dtype, copy=True).mul_(more) for t, p in zip(twins, pieces, strict=True)
        ]
    _give(twins, pieces, rest, present, counts)


@torch.no_grad()
def _whole(twins: Sequence[Twin], axes: Axes, dtype: torch.dtype) -> Steps:
    """Over all axes at once."""
    mesh = twins[0].spec.mesh
    grads, present = _taken(twins)
    flat = [g.reshape(-1) for g in grads]
    row = torch.empty(len(twins) + sum(map(len, flat)), dtype=dtype, device=grads[0].device)
    *parts, counts = row.split([*map(len, flat), len(twins)])
    torch._foreach_copy_(parts, flat)
    counts.copy_(torch.tensor(present))
    shapes = [g.shape for g in grads]
    del grads, flat
    yield comm.start_all_reduce(row, "sum", mesh.group(axes, "reduce"))
    totals = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    pieces = [piece_of(twin, total) for twin, total in zip(twins, totals, strict=True)]
    _give(twins, pieces, (), present, counts)


def _give(
    twins: Sequence[Twin],
    pieces: Sequence[Tensor],
    axes: Axes,
    present: Sequence[float],
    counts: Tensor,
) -> None:
    found = present if all(present) else counts.tolist()
    for twin, piece, count in zip(twins, pieces, found, strict=True):
        if count:
            twin.give(piece, axes)
