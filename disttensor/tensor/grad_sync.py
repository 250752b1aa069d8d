"""Gradients that are still a sum of contributions are reduced before an optimizer reads them: large
ones where they lie, the others in flat collectives, each for all that wait on the same axes, in
buckets of at most BUCKET_BYTES."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from disttensor import arguments
from disttensor.comm import desync
from disttensor.comm.sums import Slot, sums
from disttensor.comm.work import Work
from disttensor.layout import Axes
from disttensor.mesh import ProcessMesh
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.grad import set_reduced

Tensor = torch.Tensor

BUCKET_BYTES = 32 * 2**20  # of one flat reduction, unless a single gradient is larger


# Called with the parameters whose gradients are about to be read.
BEFORE_SYNC: list[Callable[[list[Any]], None]] = []


class Pending(NamedTuple):
    """A parameter (its number in the call), its gradient that waits to be reduced, and how many
    elements that takes of a flat tensor. So all ranks lay out their flat tensors alike, and
    replicas are summed in one order, whatever else lies beside them."""

    number: int
    param: DistTensor
    grad: DistTensor
    slot: Slot


def sync_gradients(*params: Any) -> None:
    """Reduce the pending gradients of ``params`` (modules, tensors, or iterables of tensors).

    One flat all-reduce for each bucket of gradients that wait on the same mesh axes, and one for
    each gradient of a megabyte, in its own memory where nobody else can see that. Nothing is sent
    where nothing is pending, so a second call costs nothing. Plain tensors are passed by.
    Optimizers, ``clip_grad_norm_`` and GradScaler do this themselves.

    >>> w = dt.ones(4, mesh=mesh, requires_grad=True)
    >>> (w * 2).sum().backward()
    >>> dt.sync_gradients([w])
    >>> w.grad.tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    given = [p for some in params for p in tensors_of(some)]
    for run in BEFORE_SYNC:
        run(given)
    started = [(members, *_start(members)) for members in buckets(given)]
    for members, totals, works in started:
        for work in works:
            work.wait()
        for m, total in zip(members, totals, strict=True):
            set_reduced(m.param, m.grad, total)


def tensors_of(params: Any) -> Iterable[Any]:
    """The tensors of a module, of an iterable, or the one that was given."""
    if isinstance(params, torch.nn.Module):
        return params.parameters()
    if isinstance(params, Tensor):
        return (params,)
    return arguments.listed("parameters", params, "a module, a tensor or an iterable of tensors")


def buckets(params: Iterable[Any]) -> Iterator[list[Pending]]:
    """What waits, in the order of ``params``, each parameter once. Follows from specs alone: alike
    on all ranks."""
    waiting: dict[tuple[ProcessMesh, Axes, torch.dtype], list[Pending]] = {}
    seen: set[int] = set()
    for number, p in enumerate(params):
        grad: Any = p.grad if type(p) is DistTensor else None
        if grad is None or not grad.spec.layout.partial or id(p) in seen:
            continue
        seen.add(id(p))
        spec = grad.spec
        busy = tuple(a for a, _ in spec.layout.partial if spec.mesh.shape[a] > 1)
        slot = Slot(math.prod(spec.box_at((0,) * spec.mesh.ndim)[1]), spec.is_even())
        waiting.setdefault((spec.mesh, busy, spec.dtype), []).append(Pending(number, p, grad, slot))
    for (_, _, dtype), members in waiting.items():
        bucket: list[Pending] = []
        size = 0
        for member in members:
            bytes_here = member.slot.numel * dtype.itemsize
            if bucket and size + bytes_here > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(member)
            size += bytes_here
        yield bucket


def _start(members: list[Pending]) -> tuple[list[Tensor], list[Work[Any]]]:
    """The totals of all members' gradients over the axes that they all wait on, once the works are
    done."""
    spec = members[0].grad.spec
    busy = tuple(a for a, _ in spec.layout.partial if spec.mesh.shape[a] > 1)
    totals = [m.grad.local for m in members]
    if not busy:
        return [t.detach() for t in totals], []
    group = spec.mesh.group(busy)
    if desync.enabled:  # flat tensors of other gradients may have one size
        names = ", ".join(f"{m.number}: {m.grad.spec!r}" for m in members)
        desync.compare(group, f"sync_gradients of {names}")
    # ``m.grad.local`` is one reference
    works = sums(totals, [m.slot for m in members], group, spec.dtype, held=1, is_grad=True)
    return totals, works
