"""The gradients of one segment, reduced: contributions on the twins become gradients of the
parameters.

    twin {dp: P, fsdp: P}  --reduce-scatter over fsdp-->  shard {dp: P}  --all-reduce over dp-->
    shard

One flat collective for all parameters that wait on the same axes. Each step is a generator: what it
yields is under way, and it is resumed when that has arrived, so that several reductions and the
rest of the backward overlap.

A row ends with one number per parameter: how many ranks bring a gradient. Where that is none, the
parameter gets none
(as in one process), though every rank took part; what a rank sends never depends on what it has.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch

from disttensor.comm import collectives
from disttensor.fsdp.bucket import Rows, packed
from disttensor.fsdp.param import Twin, piece_of
from disttensor.layout import Axes

Tensor = torch.Tensor
Steps = Generator[collectives.Pending, None, None]


def reductions(
    twins: Sequence[Twin], *, scatter: bool, last: bool, dtype: torch.dtype | None
) -> list[Steps]:
    """What reduces the gradients of these twins: one generator for all that are cut, and one for
    each set of axes of others.

    scatter  reduce to shards where the parameter is one (stages 2 and 3), else whole gradients, and
    then cut
    last     also over the axes that do not cut the parameter; else its gradient stays Partial there
    dtype    of the sums on the wire; None: that of the gradients
    """
    kinds: dict[tuple[Axes, int | None, torch.dtype, bool], list[Twin]] = {}
    for twin in twins:
        if twin.held.requires_grad:
            key = (twin.axes(), twin.axis, twin.spec.dtype, twin.even)
            kinds.setdefault(key, []).append(twin)
    out: list[Steps] = []
    together: dict[Any, list[tuple[Axes, list[Twin]]]] = {}
    for (axes, axis, of, even), members in kinds.items():
        wire = dtype or of
        if not axes:
            _settle(members)
        elif axis is not None and scatter and axis in axes:
            together.setdefault((axis, wire, even), []).append((axes, members))
        elif axis is not None and scatter:
            out.append(_sliced(members, axes, axis, last, wire))
        elif last:
            out.append(_whole(members, axes, wire))
    scattered = [_scattered(g, axis, last, wire) for (axis, wire, _), g in together.items()]
    return scattered + out


def _own_piece(twin: Twin, complete: Tensor) -> Tensor:
    """This rank's piece of a gradient that is whole everywhere: not a view, which would hold on to
    all of it."""
    piece = piece_of(twin, complete)
    return piece if piece.shape == complete.shape else piece.clone()


def make_groups(twins: Sequence[Twin], *, scatter: bool) -> None:
    """The groups that reductions of these twins need. To make one all its ranks must come: in a
    forward, where all come in the order of the program, not in a backward, where one may be waited
    for elsewhere."""
    for twin in twins:
        axes, mesh = twin.axes(), twin.spec.mesh
        if twin.axis is None or not scatter:
            ways = [(axes, "reduce")]
        else:
            rest = tuple(a for a in axes if a != twin.axis)
            ways = [((twin.axis,), "reduce"), (rest, "replicas")]
        for over, lane in ways:
            if over:
                mesh.group(over, lane)


def _settle(twins: Sequence[Twin]) -> None:
    """Nothing to communicate: gradients that are whole on every rank."""
    for twin in twins:
        _, complete = twin.take()
        if complete is not None:
            twin.give(_own_piece(twin, complete), ())


def _taken(twins: Sequence[Twin]) -> tuple[list[Tensor], list[float]]:
    """The contributions of this rank, zeros where it has none, and which it has."""
    grads, present = [], []
    for twin in twins:
        pending, complete = twin.take()
        if complete is not None:
            twin.give(_own_piece(twin, complete), ())
        present.append(0.0 if pending is None else 1.0)
        if pending is None:
            pending = torch.zeros(
                twin.spec.local_shape, dtype=twin.spec.dtype, device=twin.held.device
            )
        grads.append(pending)
    return grads, present


class Part:
    """Parameters of one wire that wait on the same axes, in a reduction to shards over ``axis``
    first.

    rest  the axes over which the shards are still to be summed then less  in fp16 what lies between
    the two sums is smaller by this factor, for all ranks: a sum over the shards alone may be
          large on its way to a small one. It grows again, by ``more``, in the dtype of the
          parameter.
    """

    def __init__(
        self, twins: Sequence[Twin], axes: Axes, axis: int, last: bool, dtype: torch.dtype
    ) -> None:
        mesh = twins[0].spec.mesh
        self.twins, self.mesh = twins, mesh
        self.index = (mesh.coordinate or ())[axis]
        self.rest = tuple(a for a in axes if a != axis)
        # What follows a first sum has an order of its own, and so another lane.
        self.replicas = mesh.group(self.rest, "replicas") if self.rest and last else None
        self.rows = Rows([t.spec.local_shape for t in twins], mesh.shape[axis])
        self.width = self.rows.total + len(twins)
        self.grads, self.present = _taken(twins)
        self.less, self.more = 1.0, 1.0
        if axis in axes and self.rest:
            ranks = math.prod(mesh.shape[a] for a in axes)
            self.less, self.more = collectives.factors("sum", ranks, dtype)

    def cut(self, dtype: torch.dtype) -> Tensor:
        """[width]: the row of this rank, of gradients that are whole over the axis already."""
        grads, self.grads = self.grads, []
        pieces = [self.rows.piece(j, g, self.index) for j, g in enumerate(grads)]
        counts = grads[0].new_tensor(self.present, dtype=dtype)
        return torch.cat([self.rows.joined(pieces, dtype), counts])

    def shards(self, row: Tensor) -> Steps:
        """From [width], summed over the axis, to gradients of the parameters."""
        pieces = self.rows.pieces(row[: self.rows.total], self.index)
        counts = row[self.rows.total :]
        rest = self.rest
        if self.replicas is not None:
            for i, twin in enumerate(self.twins):
                earlier = twin.stashed(rest)
                if earlier is not None:
                    pieces[i].add_(earlier, alpha=self.less)
                    counts[i] += 1
            yield collectives.start_all_reduce(row, "sum", self.replicas)
            rest = ()
        if self.more != 1:
            pieces = [
                p.to(t.held.dtype, copy=True).mul_(self.more)
                for t, p in zip(self.twins, pieces, strict=True)
            ]
        _give(self.twins, pieces, rest, self.present, counts)


@torch.no_grad()
def _scattered(
    groups: Sequence[tuple[Axes, Sequence[Twin]]], axis: int, last: bool, dtype: torch.dtype
) -> Steps:
    """One reduce-scatter over ``axis``; then those of each set of axes over what else they wait
    on."""
    parts = [Part(twins, axes, axis, last, dtype) for axes, twins in groups]
    mesh = parts[0].mesh
    widths = [part.width for part in parts]
    wire = packed([(part.rows, part.grads, part.present) for part in parts], dtype)
    for part, block in zip(parts, wire.split(widths, dim=1), strict=True):
        part.grads = []
        if part.less != 1:
            block.mul_(part.less)
    row = wire.new_empty(wire.shape[1])
    pending = collectives.start_reduce_scatter(
        wire.view(-1), row, "sum", mesh.group((axis,), "reduce")
    )
    del wire
    yield pending
    yield from _one_after_another(
        [p.shards(r) for p, r in zip(parts, row.split(widths), strict=True)]
    )


@torch.no_grad()
def _sliced(twins: Sequence[Twin], axes: Axes, axis: int, last: bool, dtype: torch.dtype) -> Steps:
    """Nothing to sum over ``axis``; then over the others."""
    part = Part(twins, axes, axis, last, dtype)
    row = part.cut(dtype)
    # so that what follows is in one order with that of those that had something to do
    yield collectives.OVER
    yield from part.shards(row)


def _one_after_another(steps: Sequence[Steps]) -> Steps:
    """Start them all, and go on with each when what it waits for has come."""
    for pending, rest in [(next(one, None), one) for one in steps]:
        if pending is not None:
            yield pending
            yield from rest


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
    yield collectives.start_all_reduce(row, "sum", mesh.group(axes, "reduce"))
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
