"""Caches reductions: a pending sum that one call reduces is reduced for later calls too, so that
``x.relu() + x.sigmoid()`` sends x once.

The tensor keeps its placement and its local, and the reduced value is stored with it. A later call
that could use the pending value reads the reduced value instead. Exceptions: the tensor was written
to since, or the call is in another region of activation checkpointing (a recomputation must make
the same calls as its forward). Ranks off the mesh take the same decision, without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttensor.autograd.activation_checkpoint import region
from disttensor.comm.objects import bytes_of
from disttensor.core.spec import DistSpec
from disttensor.dispatch import strict
from disttensor.dispatch.call_plan import CallPlan
from disttensor.pytree import collect, substitute
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import is_gradient
from disttensor.tensor.reshard import resharded, resharded_local
from disttensor.tensor.versions import is_handed_out, version
from disttensor.torch_private import FakeTensor, storage_id

Tensor = torch.Tensor


class Reduced:
    """A reduced value: the ``source`` and its ``version`` when it was reduced, the resulting
    ``value``, ``grad`` (a graph was built) and ``region``, the region of activation checkpointing.

    ``content``: the bytes of a source that this rank's user may write to in ways that nothing
    counts. Calls that write drop the kept value (``views.invalidate``).
    """

    __slots__ = ("content", "grad", "region", "source", "value", "version")

    def __init__(self, source: Tensor, value: DistTensor, grad: bool) -> None:
        self.source, self.value, self.grad = source, value, grad
        self.version, self.region = version(source), region()
        self.content: Tensor | None = None
        if is_handed_out(source):
            self.keep_content()

    def keep_content(self) -> None:
        if self.content is None and not (
            self.source.is_meta or isinstance(self.source, FakeTensor)
        ):
            self.content = bytes_of(self.source).clone()

    def is_current(self, local: Tensor) -> bool:
        """Returns True if ``local`` is the source, and has not been written to."""
        if self.source is not local or self.version != version(local):
            return False
        return self.content is None or torch.equal(self.content, bytes_of(local))


def _grad(x: DistTensor) -> bool:
    return x.local.requires_grad and torch.is_grad_enabled()


def store(x: DistTensor, dst: DistSpec) -> DistTensor:
    """Reduces ``x`` to ``dst``, and keeps the result."""
    inside = dst.mesh.coordinate is not None
    # only the local: a reference to x would be a cycle
    value = wrap(resharded_local(x, dst, ()) if inside else resharded(x, dst).local, dst)
    keep(x, value, _grad(x))
    return value


def keep(x: DistTensor, value: DistTensor, grad: bool) -> None:
    """Keeps ``value``, the reduction of the pending ``x``, for later calls."""
    x._reduced = Reduced(x.local, value, grad)
    views.follow_writes(x, storage_id(x.local.untyped_storage()))


def lookup(x: DistTensor) -> DistTensor | None:
    """Returns the value of ``x`` that an earlier call has reduced, or None."""
    kept: Reduced | None = x._reduced
    if kept is None or kept.grad is not _grad(x) or kept.region != region():
        return None
    if not x.is_initialized:
        return resharded(x, kept.value.spec)
    # else each rank has written to its local: by to_local(), or in a function of local_map
    return kept.value if kept.is_current(x.local) else store(x, kept.value.spec)


def find(plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, DistTensor]:
    """Returns reduced values by the ids of their pending arguments: earlier reductions, and new
    ones that the call needs. Empty: the call runs on the pending values."""
    wholes = plan.reduce_first
    tensors = collect((args, kwargs), [])
    if not wholes and not any(type(t) is DistTensor and t._reduced is not None for t in tensors):
        return {}
    found: dict[int, DistTensor] = {}
    left = False  # a sum of pending values is free, unless a value is reduced
    for i, (t, reuse) in enumerate(zip(tensors, plan.may_reuse, strict=True)):
        if not reuse or type(t) is not DistTensor or id(t) in found:
            continue
        if is_gradient(t):
            left = True
            continue
        value = None if t._reduced is None else lookup(t)
        whole = wholes[i] if wholes else None
        if value is None and whole is not None and not strict.strict.current():
            value = store(t, whole)
        if value is not None:
            found[id(t)] = value
        left = left or value is None
    return {} if left and not wholes else found


def call_with(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any], found: dict[int, DistTensor]
) -> Any:
    """Runs the call with the reduced values instead of the pending arguments."""

    def put(t: Tensor) -> Tensor:
        return found.get(id(t), t)

    out = plan.func(*substitute(tuple(args), put), **substitute(kwargs, put))
    for t in collect((args, kwargs), []):
        # off the mesh the result represents a new tensor
        if found.get(id(t)) is out and type(t) is DistTensor and t.is_initialized:
            return t
    return out
