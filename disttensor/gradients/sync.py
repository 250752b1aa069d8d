"""Reduces pending gradients before an optimizer reads them: large gradients in their own memory,
the others in flat collectives, one for each set of axes and bucket of at most BUCKET_BYTES."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from disttensor import callbacks
from disttensor.cache import cached
from disttensor.checks import check_sequence
from disttensor.comm import compare_collectives
from disttensor.comm.work import Work
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.gradients.flat_sum import BucketSlot, start_sums
from disttensor.gradients.memory import GradMemory, grad_memory_of
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.grad import reduced_spec, set_reduced
from disttensor.tensor.reshard import resharded
from disttensor.tensor.uses import aliases_of_leaf

Tensor = torch.Tensor
T = TypeVar("T")

_ADOPTS = "disttensor_settles"  # marks a leaf whose gradients are moved to their place
BUCKET_BYTES = 32 * 2**20  # of one flat reduction, unless a single gradient is larger


class Pending(NamedTuple):
    """A parameter (its number in the call), its pending gradient, and the gradient's slot in a flat
    tensor. All ranks lay out their flat tensors alike and replicas are summed in one order,
    whatever other gradients are pending."""

    number: int
    param: DistTensor
    grad: DistTensor
    slot: BucketSlot


def sync_gradients(*params: Any) -> None:
    """Reduces the pending gradients of ``params`` (modules, tensors, or iterables of tensors).

    Runs one flat all-reduce for each bucket of gradients pending on the same mesh axes. A large
    gradient is reduced in its own memory if no other reference sees it. A call without pending
    gradients sends nothing. Regular tensors are skipped.
    Optimizers, ``clip_grad_norm_`` and GradScaler call this themselves.

    >>> w = dt.ones(4, mesh=mesh, requires_grad=True)
    >>> (w * 2).sum().backward()
    >>> dt.sync_gradients([w])
    >>> w.grad.tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    given = [p for some in params for p in tensors_of(some)]
    for run in callbacks.before_grad_read:
        run(given)
    started = [(members, *_start(members)) for members in buckets(given)]
    for members, totals, works in started:
        for work in works:
            work.wait()
        for m, total in zip(members, totals, strict=True):
            set_reduced(m.param, m.grad, total)


def tensors_of(params: Any, who: str = "sync_gradients: params") -> Iterable[Any]:
    """Returns the parameters of a module, the tensors of an iterable, or a single tensor."""
    if isinstance(params, torch.nn.Module):
        return params.parameters()
    if isinstance(params, Tensor):
        return (params,)
    return check_sequence(who, params, "a module, a tensor or an iterable of tensors")


def buckets(params: Iterable[Any]) -> Iterator[list[Pending]]:
    """Yields buckets of pending gradients in the order of ``params``, each parameter once. Depends
    on specs alone, so all ranks get the same buckets."""
    by_axes: dict[tuple[ProcessMesh, Axes, torch.dtype, bool], list[Pending]] = {}
    seen: set[int] = set()
    for number, p in enumerate(params):
        grad = p.grad if type(p) is DistTensor else None
        if grad is None or not grad.spec.layout.partial or id(p) in seen:
            continue
        seen.add(id(p))
        spec = grad.spec
        axes, slot = _waits_on(spec)
        key = spec.mesh, axes, spec.dtype, grad.local.requires_grad
        by_axes.setdefault(key, []).append(Pending(number, p, grad, slot))
    for (_, _, dtype, _), members in by_axes.items():
        yield from in_buckets(members, [m.slot.numel * dtype.itemsize for m in members])


def in_buckets(members: Sequence[T], nbytes: Sequence[int]) -> Iterator[list[T]]:
    """Yields members, of ``nbytes`` each, in lists of at most BUCKET_BYTES, or of one member."""
    bucket: list[T] = []
    size = 0
    for member, bytes_here in zip(members, nbytes, strict=True):
        if bucket and size + bytes_here > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(member)
        size += bytes_here
    yield bucket


@cached(4096)
def _waits_on(spec: DistSpec) -> tuple[Axes, BucketSlot]:
    """Returns the axes over which a gradient of this spec is to be summed, and its slot, which is
    the same on all ranks."""
    axes = tuple(a for a, _ in spec.layout.partial if spec.mesh.shape[a] > 1)
    return axes, BucketSlot(spec.box_at((0,) * spec.mesh.ndim).numel, spec.is_even())


def _start(members: list[Pending]) -> tuple[list[Tensor], list[Work[Any]]]:
    """Starts the reduction of one bucket, and returns the totals (valid after the works have
    finished) and the works."""
    spec = members[0].grad.spec
    axes, _ = _waits_on(spec)
    totals = [m.grad.local for m in members]
    if totals[0].requires_grad:  # of backward(create_graph=True): keep the graph
        with torch.enable_grad():
            return [resharded(m.grad, reduced_spec(m.grad.spec)).local for m in members], []
    if not axes:
        return [t.detach() for t in totals], []
    group = spec.mesh.group(axes)
    if compare_collectives.enabled:  # flat tensors of other gradients may have the same size
        names = ", ".join(f"{m.number}: {m.grad.spec!r}" for m in members)
        compare_collectives.compare_collective(group, f"sync_gradients of {names}")
    # ``m.grad.local`` counts as one reference
    places = [_grad_place(m.param) for m in members]
    slots = [m.slot for m in members]
    works = start_sums(totals, slots, group, spec.dtype, places=places, held=1, is_grad=True)
    return totals, works


def _grad_place(x: DistTensor) -> GradMemory:
    """Returns the place of the gradient of x. If x has one leaf with pending gradients, each later
    backward moves its gradient there."""
    memory, aliases = grad_memory_of(x), aliases_of_leaf(x)
    frozen = not x.local.requires_grad  # since the backward: torch allows no hook
    if len(aliases) == 1 and not frozen and not hasattr(aliases[0], _ADOPTS):
        setattr(aliases[0], _ADOPTS, True)
        aliases[0].register_post_accumulate_grad_hook(memory.adopt_grad)
    return memory
