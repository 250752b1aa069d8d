"""Converts between torch's DTensor and DistTensor: the same layout has the same bytes, so nothing
is copied."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from disttensor.api.from_local import from_local
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Partial, Placement, Shard, as_placement
from disttensor.tensor.dist_tensor import DistTensor

_TO = {"prod": "product"}


def _torch() -> Any:
    """Loads torch.distributed.tensor on first use: its import takes longer than all of
    disttensor's."""
    return import_module("torch.distributed.tensor")


def to_dtensor(x: DistTensor) -> Any:
    """Returns x as torch's DTensor over the same local tensor; differentiable.

    Raises ValueError for layouts that DTensor cannot express: a dim split in another order than the
    mesh's, any/all reductions, placements of other types (``Balanced``, users' own), ranks that do
    not ascend along an axis.

    >>> dt.to_dtensor(dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])).placements
    (Shard(dim=0), Replicate())
    """
    if not isinstance(x, DistTensor):
        raise TypeError(f"to_dtensor: a DistTensor is expected, not {type(x).__name__}")
    mesh = x.spec.mesh
    if any(tuple(sorted(a)) != a for a in x.spec.layout.dims):
        raise ValueError(f"{x.spec!r}: DTensor splits a dim in mesh order only; reshard it first")
    if x.spec.layout.custom:
        raise ValueError(
            f"{x.spec!r}: DTensor knows Shard, Replicate and Partial only; reshard it to one of "
            "these first: dt.reshard(x, x.process_mesh, [dt.Shard(0), ...])"
        )
    if any(not mesh.group((a,)).in_rank_order for a in range(mesh.ndim)):
        raise ValueError(
            f"{mesh!r}: DTensor joins pieces in the order of ranks, not of the mesh; use a mesh "
            "whose ranks ascend along each axis"
        )
    theirs = _torch()
    placements: list[Any] = []
    for p in x.placements:
        if isinstance(p, Partial):
            if p.reduce_op in ("any", "all"):
                raise ValueError(
                    f"{x.spec!r}: DTensor has no reduction {p.reduce_op!r}; reshard it first"
                )
            placements.append(theirs.Partial(_TO.get(p.reduce_op, p.reduce_op)))
        else:
            placements.append(theirs.Shard(p.dim) if isinstance(p, Shard) else theirs.Replicate())
    return theirs.DTensor.from_local(
        x.local,
        mesh.to_device_mesh(),
        placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


def from_dtensor(x: Any) -> DistTensor:
    """Returns a torch DTensor as a DistTensor over the same local tensor; differentiable.

    Raises ValueError for private placements (_StridedShard and others).

    >>> x = dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> dt.from_dtensor(dt.to_dtensor(x)).placements
    (Shard(0), Replicate())
    """
    theirs = _torch()
    if not isinstance(x, theirs.DTensor):
        raise TypeError(f"from_dtensor: a torch DTensor is expected, not {type(x).__name__}")
    mesh = ProcessMesh.from_device_mesh(x.device_mesh)
    placements = [as_placement(p) for p in x.placements]
    for p in placements:
        if not isinstance(p, Placement):
            raise ValueError(
                f"from_dtensor: placement {p} of {x.placements} has no counterpart; redistribute "
                "the DTensor first"
            )
    local = x.to_local()
    return from_local(local, mesh, placements, shape=x.shape)
