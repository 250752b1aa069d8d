"""Reduces the gradients of one segment: gradients of unsharded parameters become gradients of
sharded ones.

    reduce-scatter over fsdp    {dp: P, fsdp: P} -> {dp: P, fsdp: S}
    all-reduce over dp          {dp: P, fsdp: S} -> {dp: R, fsdp: S}

Parameters that wait on the same axes share one flat collective. Each reduction is a generator: it
yields the collective that runs, and is resumed after its end, so that several reductions and the
rest of the backward overlap.

A row ends with one number per parameter: the count of ranks that have a gradient of it. If the
count is 0, the parameter gets no gradient (as in one process), though every rank took part. The
messages of a rank never depend on the gradients that it has.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch

from disttensor.comm import buffers, collectives, objects
from disttensor.comm.buffers import constants
from disttensor.comm.collectives import start_async
from disttensor.comm.wire import factors
from disttensor.comm.work import Work, finished
from disttensor.core.layout import Axes
from disttensor.gradients.accumulate import GradAccumulator
from disttensor.gradients.flat_sum import BucketSlot, start_sums
from disttensor.gradients.memory import grad_memory_of
from disttensor.gradients.rows import BucketLayout, pack
from disttensor.tensor.grad import reduced_spec
from disttensor.tensor.reshard import resharded

Tensor = torch.Tensor
Params = Sequence[GradAccumulator]
Reduction = Generator[Work[Any], None, None]


def reductions(params: Params, *, scatter: bool, last: bool, custom: Any = None) -> list[Reduction]:
    """Returns the reductions of the gradients of these parameters: one generator for all sharded
    ones, and one for each set of axes of others.

    scatter  reduce to shards (stages 2 and 3); otherwise reduce full gradients, then cut them
    last     also reduce over axes that do not shard the parameter; otherwise its gradient stays
             Partial on them
    custom   the user's reduce-scatter
    """
    kinds: dict[tuple[Any, ...], list[GradAccumulator]] = {}
    for param in params:
        if param.sharded_param.requires_grad:
            key = param.pending_axes(), param.axis, param.spec.dtype, param.reduce_dtype
            kinds.setdefault((*key, param.divisible), []).append(param)
    out: list[Reduction] = []
    together: dict[Any, list[tuple[Axes, list[GradAccumulator]]]] = {}
    for (axes, axis, _, wire, divisible), members in kinds.items():
        if not axes:
            _accumulate_complete(members)
        elif axis is not None and scatter and axis in axes:
            together.setdefault((axis, wire, divisible), []).append((axes, members))
        elif axis is not None and scatter:
            out.append(_slice(members, axes, axis, last, wire))
        elif last:
            out.append(_all_reduce(members, axes, wire))
    scattered = together.items()
    return [_reduce_scatter(g, axis, last, wire, custom) for (axis, wire, _), g in scattered] + out


def accumulate_in_graph(params: Params, *, last: bool) -> None:
    """Reduces each gradient on its own, differentiably, after backward(create_graph=True).

    Raises RuntimeError, on all ranks, if some of them have no gradient of a parameter, or if a hook
    would change gradients in place.
    """
    if any(p.all_reduce_hook is not None for p in params):
        raise RuntimeError(
            "backward(create_graph=True): the hook of set_all_reduce_hook changes gradients in "
            "place, which cannot be differentiated: register_hook of the parameter's uses can"
        )
    for param in params:
        pieces, axes = param.pop_pieces(), param.pending_axes()
        if axes:
            group = param.spec.mesh.group(axes, "reduce")
            present = torch.tensor([float(bool(pieces))], device=param.sharded_param.device)
            collectives.all_reduce(present, "sum", group, inplace=True)
            (count,) = objects.received_numbers(present, [group.size * present.item()])
            if 0 < count < group.size:
                raise RuntimeError(
                    f"backward(create_graph=True): {group.size - count:.0f} of {group.size} ranks "
                    f"have no gradient of {param.name!r}, so it cannot be differentiated again. "
                    "Let the loss depend on this parameter on every rank"
                )
        if pieces:
            with torch.enable_grad():
                grad = param.gradient(pieces)
                param.accumulate_in_graph(
                    resharded(grad, reduced_spec(grad.spec)) if last else grad
                )


def make_groups(params: Params, *, scatter: bool) -> None:
    """Makes the groups that reductions of these parameters need. All ranks of a group must take
    part. They do in a forward, which runs in program order; in a backward, another rank may already
    wait elsewhere."""
    for param in params:
        axes, mesh = param.pending_axes(), param.spec.mesh
        groups = [(axes, "reduce")]
        if param.axis is not None and scatter:
            rest = tuple(a for a in axes if a != param.axis)
            groups = [((param.axis,), "reduce"), (rest, "replicas")]
        for over, purpose in groups:
            if over:
                mesh.group(over, purpose)


def _accumulate_complete(params: Params) -> list[Tensor | None]:
    """Accumulates gradients that are complete on every rank, without communication, and returns the
    pending ones."""
    out = []
    for param in params:
        pending, complete = param.pop_grads()
        if complete is not None:
            piece = param.own_piece(complete)
            # Not a view, which would hold on to the full gradient.
            piece = piece if piece.shape == complete.shape else piece.clone()
            param.accumulate_grad(piece, ())
        out.append(pending)
    return out


def _pop_grads(params: Params) -> tuple[list[Tensor], list[float]]:
    """Returns the contributions of this rank, zeros for missing ones, and 1.0 or 0.0 for each."""
    grads = _accumulate_complete(params)
    present = [float(grad is not None) for grad in grads]
    return [p.zeros() if g is None else g for p, g in zip(params, grads, strict=True)], present


class _ReduceBucket:
    """Parameters that wait on the same axes, in a reduction to shards over ``axis``.

    rest       the other axes, over which the shards are summed next
    prescale   against overflow in fp16, applied before the reduce-scatter; ``postscale`` after the
               all-reduce, in the dtype of the parameter
    """

    def __init__(
        self,
        params: Params,
        axes: Axes,
        axis: int,
        last: bool,
        dtype: torch.dtype,
    ) -> None:
        mesh = params[0].spec.mesh
        self.params, self.mesh = params, mesh
        self.index = (mesh.coordinate or ())[axis]
        self.rest = tuple(a for a in axes if a != axis)
        # A separate group: all-reduces after the reduce-scatters come in another order.
        self.replicas = mesh.group(self.rest, "replicas") if self.rest and last else None
        self.layout = BucketLayout([p.rows_shape for p in params], mesh.shape[axis])
        self.width = self.layout.total + len(params)
        grads, self.present = _pop_grads(params)
        self.grads = [p.rows(grad) for p, grad in zip(params, grads, strict=True)]
        self.prescale, self.postscale = 1.0, 1.0
        if axis in axes and self.rest:
            ranks = math.prod(mesh.shape[a] for a in axes)
            self.prescale, self.postscale = factors("sum", ranks, dtype)

    def own_row(self, dtype: torch.dtype) -> Tensor:
        """Returns [width]: this rank's row of gradients that are complete over the axis."""
        grads, self.grads = self.grads, []
        pieces = [self.layout.piece(j, g, self.index) for j, g in enumerate(grads)]
        counts = constants(tuple(self.present), dtype, grads[0].device)
        return torch.cat([self.layout.pack_row(pieces, dtype), counts])

    def reduce_replicas(self, row: Tensor) -> Reduction:
        """Reduces [width], summed over the axis, to gradients of the parameters."""
        rows = self.layout.pieces(row[: self.layout.total], self.index)
        pieces = [p.from_rows(piece) for p, piece in zip(self.params, rows, strict=True)]
        counts = row[self.layout.total :]
        rest = self.rest
        if self.replicas is not None:
            for i, param in enumerate(self.params):
                earlier = param.pop_partial(rest)
                if earlier is not None:
                    pieces[i].add_(earlier, alpha=self.prescale)
                    counts[i] += 1
                    self.present[i] = 1.0
            yield start_async(collectives.all_reduce, row, "sum", self.replicas, inplace=True)
            rest = ()
        if self.postscale != 1:
            pieces = [
                piece.to(param.sharded_param.dtype, copy=True).mul_(self.postscale)
                for param, piece in zip(self.params, pieces, strict=True)
            ]
        _accumulate(self.params, pieces, rest, self.present, counts)


@torch.no_grad()
def _reduce_scatter(
    groups: Sequence[tuple[Axes, Params]], axis: int, last: bool, dtype: torch.dtype,
    custom: Any,
) -> Reduction:  # fmt: skip
    """Runs one reduce-scatter over ``axis``; then reduces over each set of remaining axes."""
    buckets = [_ReduceBucket(params, axes, axis, last, dtype) for axes, params in groups]
    mesh = buckets[0].mesh
    widths = [bucket.width for bucket in buckets]
    wire = pack([(b.layout, b.grads, b.present) for b in buckets], dtype, custom)
    for bucket, block in zip(buckets, wire.split(widths, dim=1), strict=True):
        bucket.grads = []
        if bucket.prescale != 1:
            block.mul_(bucket.prescale)
    width = wire.shape[1]
    row = (
        wire.new_empty(width)
        if custom is None
        else buffers.empty(width, dtype, wire.device, custom)
    )
    group = mesh.group((axis,), "reduce")
    work = start_async(
        collectives.reduce_scatter, wire.view(-1), "sum", group, out=row, custom=custom
    )
    del wire, block
    yield work
    steps = [b.reduce_replicas(r) for b, r in zip(buckets, row.split(widths), strict=True)]
    for work_, rest in [(next(one, None), one) for one in steps]:  # start all, then finish each
        if work_ is not None:
            yield work_
            yield from rest


@torch.no_grad()
def _slice(params: Params, axes: Axes, axis: int, last: bool, dtype: torch.dtype) -> Reduction:
    """Cuts gradients that are complete over ``axis``; then reduces over the other axes."""
    bucket = _ReduceBucket(params, axes, axis, last, dtype)
    row = bucket.own_row(dtype)
    # Yield to keep the order of the reductions that communicated.
    yield finished(row)
    yield from bucket.reduce_replicas(row)


@torch.no_grad()
def _all_reduce(params: Params, axes: Axes, dtype: torch.dtype) -> Reduction:
    """Reduces over all axes at once."""
    mesh = params[0].spec.mesh
    grads, present = _pop_grads(params)
    slots = [
        BucketSlot(grad.numel(), param.divisible) for param, grad in zip(params, grads, strict=True)
    ]
    grads.append(constants(tuple(present), dtype, grads[0].device))
    slots.append(BucketSlot(len(params), False))
    places = [grad_memory_of(param.sharded_param) for param in params]
    yield from start_sums(grads, slots, mesh.group(axes, "reduce"), dtype, places=places)
    counts = grads.pop()
    pieces = [param.own_piece(total) for param, total in zip(params, grads, strict=True)]
    _accumulate(params, pieces, (), present, counts)


def _accumulate(
    params: Params,
    pieces: Sequence[Tensor],
    axes: Axes,
    present: Sequence[float],
    counts: Tensor,
) -> None:
    found = present if all(present) else objects.received_numbers(counts, present)
    for param, piece, count in zip(params, pieces, found, strict=True):
        if count:
            param.accumulate_grad(piece, axes)
