"""Data parallelism by the names that PyTorch has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from disttensor.checks import check_type
from disttensor.core.init_mesh import mesh_of_all
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Shard
from disttensor.fsdp.fsdp_module import as_fsdp_module
from disttensor.fsdp.fully_shard import shard_data_parallel
from disttensor.fsdp.segment_policy import Segments


def fully_shard(
    module: nn.Module, *, mesh: Any = None, reshard_after_forward: bool = True,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: Any = None, ignored_params: Iterable[nn.Parameter] | None = None,
    segments: Segments | None = None,
) -> nn.Module:  # fmt: skip
    """Shards parameters, gradients and optimizer state over a mesh axis, as torch's does.

    It equals ``shard_data_parallel(stage=3)``. Call it for inner modules first, as torch's, or once
    with ``segments``. The module gets the methods of ``dt.fsdp.FSDPModule``.

    Args:
        module: a model, or a module in it; it is changed in place and returned.
        mesh: a ProcessMesh or torch's DeviceMesh. One axis: shards; two axes: replicas (the first)
            of shards (the second). None: one axis of all ranks.
        reshard_after_forward, shard_placement_fn, mp_policy, ignored_params: as in torch.
        segments: as in ``shard_data_parallel``, for example names of modules.

    Raises ValueError for a mesh of more axes, and if the module, or one around, is sharded already.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> dt.fully_shard(model, mesh=mesh)[0].weight.placements
    (Replicate(), Shard(0))
    """
    mesh = _mesh("fully_shard", mesh, 2)
    check_type("fully_shard: module", module, nn.Module, "a module")
    replicas = mesh.dim_names[0] if mesh.ndim == 2 else None
    return as_fsdp_module(shard_data_parallel(
        module, mesh, mesh.dim_names[-1], replicas, segments=segments,
        reshard_after_forward=reshard_after_forward, mp_policy=mp_policy,
        ignored_params=ignored_params or (), shard_placement_fn=shard_placement_fn,
    ))  # fmt: skip


def replicate(
    module: nn.Module, *, mesh: Any = None, mp_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:  # fmt: skip
    """Replicates parameters on each rank, as torch's ``replicate`` and DDP do.

    It equals ``shard_data_parallel(shard_axis=None)``: gradients are reduced during the backward.
    Modules in one model may be replicated and fully sharded, inner ones first. The module gets the
    methods of ``dt.fsdp.FSDPModule``.

    Args:
        module: a model, or a module in it; it is changed in place and returned.
        mesh: a ProcessMesh or torch's DeviceMesh of one axis; None: one axis of all ranks.
        mp_policy, ignored_params: as in ``shard_data_parallel``.

    Raises ValueError for a mesh of several axes.

    >>> line = dt.init_mesh((1,), ("dp",))
    >>> dt.replicate(torch.nn.Linear(4, 8), mesh=line).weight.placements
    (Replicate(),)
    """
    return as_fsdp_module(shard_data_parallel(
        module, _mesh("replicate", mesh, 1), None, mp_policy=mp_policy,
        ignored_params=ignored_params or (),
    ))  # fmt: skip


def _mesh(who: str, mesh: Any, most: int) -> ProcessMesh:
    if mesh is None:
        return mesh_of_all("dp")
    mesh = as_mesh(f"{who}: mesh", mesh)
    if mesh.ndim > most:
        raise ValueError(
            f"{who}: {mesh!r} has {mesh.ndim} axes, and at most {most} are expected; give the "
            "sub-mesh of the data axes, as mesh['dp']"
        )
    return mesh
