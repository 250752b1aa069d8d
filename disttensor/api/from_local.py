"""from_local: makes a DistTensor of pieces that the ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from disttensor.autograd.grad_types import GradType, reshard_local
from disttensor.checks import check_bool, check_dense, check_shape
from disttensor.comm import compare_collectives, compare_programs, objects
from disttensor.comm.agree import agree
from disttensor.core.layout import Axes, Layout
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement
from disttensor.core.spec import DistSpec, check_spec, layout_from, spec_of
from disttensor.off_mesh import execute
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.values import axes_of_grad

Tensor = torch.Tensor


def from_local(
    local: Tensor, mesh: ProcessMesh, placements: Sequence[Placement] | None = None, *,
    shape: Sequence[int] | None = None,
    dims_mapping: Any = None, partial_status: Any = None, run_check: bool = True,
    grad_placements: Sequence[Placement] | None = None,
) -> DistTensor:  # fmt: skip
    """Returns the DistTensor of which ``local`` is this rank's piece; differentiable.

    Args:
        local: the piece, cut as by torch.chunk (5 over 4: 2, 2, 1, 0). On a rank off the mesh only
            its dtype and requires_grad count, and only with ``shape=``.
        placements: one for each mesh axis; or ``dims_mapping`` and ``partial_status``.
        shape: the global shape. Without it the ranks exchange sizes of their pieces, and compare
            dtype and requires_grad.
        run_check: False sends nothing, as in torch. Each rank, also off the mesh, assumes that all
            pieces have the size of its own; ``dt.debugging.compare_ranks()`` finds if they differ.
        grad_placements: the placements of the gradient of ``local``, as in torch: Shard for Shard,
            Replicate for Partial, Replicate (the default) or Partial("sum") for Replicate.

    Raises:
        ValueError: on all ranks, if the pieces do not form a tensor. With ``shape=`` only the rank
            whose piece has another size raises it.
        MismatchError: on all ranks, if the pieces differ in dtype, number of dims or requires_grad.
            With ``shape=`` the next optimizer step raises it, or ``dt.debugging.compare_ranks()``.

    >>> dt.from_local(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Replicate()]).shape
    torch.Size([4, 6])
    """
    mesh = as_mesh("from_local: mesh", mesh)
    check_dense("from_local: local", local, meta=True)
    if shape is not None:
        shape = check_shape("from_local: shape", shape)
    check_bool("from_local: run_check", run_check)
    how = placements, dims_mapping, partial_status
    axes: Axes = ()
    if grad_placements is not None:
        spec = spec_of(mesh, local.shape, local.dtype, *how)
        axes = axes_of_grad("from_local", spec, grad_placements)
    if shape is None and not run_check:
        layout = layout_from(mesh, local.ndim, *how)
        parts = [math.prod(mesh.shape[a] for a in axes) for axes in layout.dims]
        shape = [n * k for n, k in zip(local.shape, parts, strict=True)]
    if mesh.coordinate is None:
        received: Any = shape, local.dtype, _requires_grad(local)
        if shape is None:
            received = objects.recv_object(mesh.root.ranks, mesh.device)
        size, dtype, requires_grad = received
        return execute.off_mesh_leaf(spec_of(mesh, size, dtype, *how), requires_grad)
    asked = shape is None
    with objects.send_errors(mesh.root.ranks, mesh.device) if asked else nullcontext():
        x = from_pieces(local, mesh, layout_from(mesh, local.ndim, *how), shape, axes)
    compare_programs.record_entry("from_local", x.spec, x.requires_grad)
    if asked:
        known = tuple(x.shape), x.dtype, x.requires_grad
        objects.send_object(known, mesh.root.ranks, mesh.device)
    return x


def _requires_grad(local: Tensor) -> bool:
    return local.requires_grad and torch.is_grad_enabled()


def from_pieces(
    local: Tensor, mesh: ProcessMesh, layout: Layout, shape: Sequence[int] | None, axes: Axes = ()
) -> DistTensor:
    """Runs ``from_local`` on the ranks of the mesh. The gradient of ``local`` is a pending sum over
    ``axes``."""
    if shape is None or compare_collectives.enabled:
        pieces = agree(
            "from_local", mesh.group(tuple(range(mesh.ndim))), tuple(local.shape),
            dtype=local.dtype, ndim=local.ndim, requires_grad=_requires_grad(local),
        )  # fmt: skip
        if shape is None:
            shape = _global_shape(pieces, layout, mesh)
        _check_pieces(check_spec(DistSpec(mesh, layout, shape, local.dtype)), pieces)
    spec = check_spec(DistSpec(mesh, layout, shape, local.dtype))
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"from_local: this rank's piece of {spec!r} has shape {list(spec.local_shape)}, not "
            f"{list(local.shape)}"
        )
    local = local if local.is_meta else local.to(mesh.device)
    if _requires_grad(local):
        read = GradType(spec, axes)
        local = reshard_local(local, read, GradType(spec), None) if axes else local.view_as(local)
    else:
        local = local.detach()  # a leaf of its own, so that marks of one leave the others
    out = wrap(local, spec)
    if layout.partial:
        views.mark_given_out(out)
    return out


def _check_pieces(spec: DistSpec, everyone: Sequence[tuple[int, ...]]) -> None:
    mesh = spec.mesh
    for rank, place, sizes in zip(mesh.ranks, mesh.coordinates(), everyone, strict=True):
        wanted = spec.box_at(place).shape
        if sizes != wanted:
            raise ValueError(
                f"from_local: the pieces do not form {spec!r}: rank {rank} has {list(sizes)}, and "
                f"{list(wanted)} is expected (all pieces: {[list(s) for s in everyone]}). Split "
                "the tensor as torch.chunk does"
            )


def _global_shape(
    everyone: Sequence[tuple[int, ...]], layout: Layout, mesh: ProcessMesh
) -> list[int]:
    """Returns the global shape from the pieces of all ranks: the sizes add up along the axes of
    each dim."""
    pieces = dict(zip(mesh.coordinates(), everyone, strict=True))
    origin = (0,) * mesh.ndim
    return [
        sum(pieces[place][d] for place in mesh.members(axes, origin))
        for d, axes in enumerate(layout.dims)
    ]
