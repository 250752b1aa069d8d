"""Reshards a tensor, differentiably: within its mesh, and from one mesh to another.

A reshard to another mesh is called by every rank of the world: ranks of the source send, ranks of
the target receive, the others pass the token on. The backward sends the gradient back, between the
gradient types of both (``disttensor.autograd.grad_types``). Every rank that sent or received
reaches it: through the local if there is one, else through the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.cross_mesh import cross_mesh_transfer, own_memory
from disttensor.autograd.grad_types import GradType, apply_transition, transition_between
from disttensor.cache import Cache, cached
from disttensor.comm import p2p
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement
from disttensor.core.spec import DistSpec, spec_of
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.uses import set_derivation, varying_axes
from disttensor.torch_private import storage_id
from reshard import cross_mesh
from reshard.cross_mesh import start

Tensor = torch.Tensor
T = TypeVar("T", bound=MeshTensor)
# the MicroBatchGraph of the micro-batch that runs: see disttensor.pipeline
MICRO_BATCH: ContextVar[Any] = ContextVar("micro batch", default=None)


@cached(4096)
def is_local_relabel(src: DistSpec, dst: DistSpec) -> bool:
    """Returns True if the layouts differ on axes of size 1 only, so that both share one memory."""
    axes = zip(src.placements, dst.placements, src.mesh.shape, strict=True)
    return all(n == 1 or p == q for p, q, n in axes)


class ReshardKind(NamedTuple):
    """stays: True if a local of the source is a local of the target. with_grad: the same for a
    local that requires grad; False for a pending reduction without a gradient, as ``max``, so that
    it is refused on one rank too. cuts: True if the reshard splits a dim over an axis on which the
    source is replicated."""

    stays: bool
    with_grad: bool
    cuts: bool


@cached(4096)
def reshard_kind(src: DistSpec, dst: DistSpec) -> ReshardKind:
    same = is_local_relabel(src, dst)
    has_gradient = all(op in ("sum", "avg") for _, op in src.layout.partial)
    return ReshardKind(same, same and has_gradient, not src.varies.issuperset(dst.layout.sharded))


def resharded_local(x: MeshTensor, dst: DistSpec, axes: Axes) -> Tensor:
    """Returns the local of x resharded to ``dst``, a spec of the same mesh, for a use that varies
    over ``axes``."""
    src = x.spec
    if src is dst:
        return x.local_for(axes)
    local = x.local
    stays, with_grad, cuts = reshard_kind(src, dst)
    if with_grad if local.requires_grad else stays:
        return x.local_for(axes)
    if not local.requires_grad or not torch.is_grad_enabled():
        return cross_mesh.run(local, src, dst)
    if axes or cuts:
        read = varying_axes(x, dst, axes)
        return apply_transition(x.local_for(read), transition_between(src, read, dst, axes), None)
    return apply_transition(local, transition_between(src, (), dst, ()), None)


def resharded(x: T, dst: DistSpec, fresh: bool = False) -> T:
    """Returns ``x`` in the layout ``dst``, or x itself if it has this layout.

    ``fresh``: a new result shares no memory with x (a piece of a replicated tensor would be a view
    of it).
    """
    if dst.mesh is not x.spec.mesh:
        return _reshard_across(x, dst)
    if x.spec is dst:
        return x
    if not x.is_initialized:
        return x.like(x.local if torch.is_grad_enabled() else x.local.detach(), dst)
    moved = resharded_local(x, dst, ())
    if fresh and storage_id(moved.untyped_storage()) == storage_id(x.local.untyped_storage()):
        moved = moved.clone()
    out = x.like(moved, dst)
    if moved.requires_grad:
        set_derivation(out, moved, x)
    return out


def resharded_with_dtypes(x: T, dst: DistSpec, grad_dtype: torch.dtype | None) -> T:
    """Casts x to the dtype of ``dst``, a spec of the same mesh, and reshards it. The gradient is
    resharded in ``grad_dtype``, or else in the dtype of x, and cast to the dtype of x."""
    local = x.local
    if not x.is_initialized:
        return x.like(local if torch.is_grad_enabled() else local.detach(), dst)
    if not local.requires_grad or not torch.is_grad_enabled():
        return resharded(
            x.like(local.detach().to(dst.dtype), x.spec.with_dtype(dst.dtype)), dst, True
        )
    read = varying_axes(x, dst, ()) if grad_dtype is None else ()
    moved = apply_transition(
        x.local_for(read), transition_between(x.spec, read, dst, (), grad_dtype), None
    )
    if storage_id(moved.untyped_storage()) == storage_id(local.untyped_storage()):
        moved = moved.clone()
    out = x.like(moved, dst)
    set_derivation(out, moved, x, None, () if grad_dtype is None else (grad_dtype,))
    return out


def local_of_global(value: Tensor, spec: DistSpec) -> Tensor:
    """Returns the local in ``spec`` of a DistTensor, or of a regular tensor with the global value,
    which all ranks have."""
    if isinstance(value, MeshTensor):
        return resharded(value, spec).local
    return cross_mesh.run(value, spec.replicated(), spec)


_targets: Cache[Any, DistSpec] = Cache(4096)


def target(
    src: DistSpec,
    mesh: ProcessMesh,
    placements: Sequence[Placement] | None,
    dims_mapping: Any,
    partial_status: Any,
) -> DistSpec:
    """Returns the spec of a tensor of ``src`` on ``mesh`` in another layout."""
    key: Any = None
    if dims_mapping is None and partial_status is None:
        if placements is None:
            key = src, mesh
        elif type(placements) in (list, tuple):
            key = src, mesh, *placements
    try:
        dst = _targets.get(key)
    except TypeError:  # an unhashable value is no placement, either
        dst = key = None
    if dst is None:
        dst = spec_of(mesh, src.shape, src.dtype, placements, dims_mapping, partial_status)
        if key is not None:
            _targets[key] = dst
    return dst


# To another mesh ----------------------------------------------------------------------------------


def _reshard_on_roots(x: T, dst: DistSpec) -> T:
    """Reshards ``x`` from or to a sub-mesh by way of the root meshes. A sub-mesh differs between
    ranks; the reshard between the roots is the same on all. The local is the same on both."""
    seen = x.like(_alias(x.local_for(())), x.spec.on_root())
    out = resharded(seen, dst.on_root())
    local = _alias(out.local_for(()))
    if storage_id(local.untyped_storage()) == storage_id(x.local.untyped_storage()):
        local = local.clone()
    return x.like(local, dst)


def _alias(local: Tensor) -> Tensor:
    """Returns a non-leaf view: a use that varies over an axis of the root is then reduced."""
    return local.view_as(local)


def _reshard_across(x: T, dst: DistSpec) -> T:
    """Reshards ``x`` to ``dst`` on another mesh. Every rank of the world calls this."""
    src = x.spec
    if src.on_root() is not src or dst.on_root() is not dst:
        return _reshard_on_roots(x, dst)
    local = x.local
    if type(local) is not Tensor:
        views.check(x)
    graph = MICRO_BATCH.get()
    needed = local.requires_grad and torch.is_grad_enabled()
    if graph is not None:
        graph.record_transfer(src.mesh, dst.mesh, needed)
    sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
    where = activation_checkpoint.current_run()
    if not sends and not receives:
        if where is None or activation_checkpoint.recompute_around(where) is None:
            p2p.next_tag()
        device, joins = dst.mesh.device, local.requires_grad
        return x.like(token.join([local], device) if joins else token.no_grad_token(device), dst)
    held = None if where is None else activation_checkpoint.repeated_note(where)
    tag = p2p.next_tag() if held is None else -1
    repeated = held is not None
    if held is None:
        arrival = start(local.detach(), src, dst, tag)
        held = graph.receive(arrival, src, dst, tag) if graph is not None else arrival.wait()
        held = own_memory(held, local) if sends and receives else held
    if where is not None:  # the recomputation of a region sends and receives nothing
        activation_checkpoint.add_note(where, held)
        held = held.clone()  # the program may write it, and each recomputation starts from the note
    if not needed:
        return x.like(held.detach() if receives else token.no_grad_token(dst.mesh.device), dst)
    reached = local if sends or local.grad_fn is not None else token.no_grad_token(src.mesh.device)
    if graph is not None and not repeated:
        return x.like(graph.cut(reached, held, src, dst, tag), dst)
    return x.like(cross_mesh_transfer(reached, held, GradType(src), GradType(dst), tag), dst)
