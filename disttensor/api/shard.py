"""shard_tensor and reshard: put a value on a mesh, and change its layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disttensor.autograd.grad_types import scale_average_grad
from disttensor.checks import (
    argument_error,
    check_bool,
    check_dense,
    check_differentiable,
    check_dtype,
    check_int,
)
from disttensor.comm import collectives, compare_programs, objects
from disttensor.comm.agree import agree
from disttensor.comm.compare_values import compare_values, is_due
from disttensor.comm.process_group import world
from disttensor.core.init_mesh import mesh_of_all
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement
from disttensor.core.spec import DistSpec, spec_of
from disttensor.errors import MismatchError, user_place
from disttensor.off_mesh import execute
from disttensor.runtime import current_runtime
from disttensor.tensor.awaited import start_reshard
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded, target
from reshard import cross_mesh

Tensor = torch.Tensor


def shard_tensor(
    data: Any, mesh: ProcessMesh, placements: Sequence[Placement] | None = None, *,
    dims_mapping: Any = None,
    partial_status: Mapping[int, str] | None = None, dtype: torch.dtype | None = None,
    requires_grad: bool | None = None,
    src_rank: int | None = None, check: bool | None = None,
) -> DistTensor:  # fmt: skip
    """Returns ``data``, the global value on every rank, as a DistTensor: each rank keeps its piece.

    ``src_rank``: only the data of this global rank count and are sent to the others, so that ranks
    cannot differ (the others give a tensor of the same shape and dtype). ``check=True`` compares
    the data of all ranks, on the ranks of the whole mesh, and names the ranks that differ; by
    default the ranks of ``mesh`` compare some elements at the calls 1, 2, 4, 8, ... of a line, and
    ``check=False`` compares nothing. A leaf gives a leaf; data in a graph
    stays in it. Without placements and dims_mapping it is replicated. A rank off the mesh gives
    data of the same shape and dtype, and keeps nothing of it. A tensor on the meta device gives
    pieces there (``module.to_empty(device=...)`` then makes memory). A DistTensor is resharded.

    >>> x = dt.shard_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Shard(1)])
    >>> x.process_mesh, x.dims_mapping
    (ProcessMesh(dp=1, tp=1), [0, 1])
    """
    mesh = as_mesh("shard_tensor: mesh", mesh)
    check_dtype("shard_tensor: dtype", dtype)
    if check is not None:
        check_bool("shard_tensor: check", check)
    if src_rank is not None:
        check_int("shard_tensor: src_rank", src_rank)
    how = placements, dims_mapping, partial_status
    if isinstance(data, DistTensor):
        return _reshard_dist_tensor(data, mesh, how, dtype, requires_grad, src_rank)
    value = _values(data, meta=src_rank is None and not check)
    in_graph = value.requires_grad and not value.is_leaf and torch.is_grad_enabled()
    if requires_grad is None:
        requires_grad = value.requires_grad
    root = mesh.root
    if src_rank is not None and src_rank not in root.ranks:
        raise ValueError(
            f"src_rank={src_rank} is not in {root!r}; its ranks are {list(root.ranks)}"
        )
    check_differentiable("shard_tensor", requires_grad, dtype or value.dtype)
    spec = spec_of(mesh, value.shape, dtype or value.dtype, *how)
    compare_programs.record_entry("shard_tensor", spec, requires_grad)
    if src_rank is not None and mesh.coordinate is not None:
        agree(
            "shard_tensor", root.group(tuple(range(root.ndim))), src_rank=src_rank,
            dtype=value.dtype, shape=tuple(value.shape), requires_grad=requires_grad,
            in_graph=in_graph,
        )  # fmt: skip
    in_graph = in_graph and requires_grad
    if in_graph and src_rank is not None:
        raise ValueError(
            f"shard_tensor: src_rank={src_rank} of data in a graph: the other ranks' data have no "
            "part in the result, and so no gradient. Give data.detach(), or leave src_rank out"
        )
    if mesh.coordinate is None and not in_graph:
        return _as_parameter(execute.off_mesh_leaf(spec, requires_grad), data)
    value = value if in_graph else value.detach()
    value = value.to(device="meta" if value.is_meta else mesh.device, dtype=spec.dtype)
    if in_graph:
        return _from_all_ranks(value, spec)
    if src_rank is not None:
        group = root.group(tuple(range(root.ndim)))
        value = collectives.broadcast(value, group.ranks.index(src_rank), group)
    elif check:
        _compare(value, root)
    elif check is None and not value.is_meta and mesh.size > 1:
        _compare_some(value, mesh)
    local = cross_mesh.run(value, spec.replicated(), spec)
    if not value.is_meta and (
        local.untyped_storage().nbytes() > local.nbytes
        or local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    ):
        local = local.clone(memory_format=torch.contiguous_format)
    local = scale_average_grad(local.requires_grad_(requires_grad), spec)
    return _as_parameter(wrap(local, spec), data)


def _from_all_ranks(value: Tensor, spec: DistSpec) -> DistTensor:
    """Returns ``value``, which is in a graph on every rank of the world, in ``spec``. Its gradient
    reaches every rank, also off the mesh."""
    full, size = spec.replicated(), world()[1]
    if spec.mesh.root.size == size:
        return resharded(wrap(value, full), spec)
    everyone = ProcessMesh(range(size), ("world",), spec.mesh.device_type)
    source = DistSpec(everyone, full.layout, full.shape, full.dtype)
    return resharded(resharded(wrap(value, source), full), spec)


def _values(data: Any, meta: bool) -> Tensor:
    """Returns ``data`` as a regular tensor; a tensor on the meta device is allowed if ``meta``."""
    if not isinstance(data, Tensor):
        try:
            return torch.as_tensor(data)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = "a tensor, an array, or numbers in lists of one length"
            raise argument_error("shard_tensor: data", data, expected, type(error)) from None
    check_dense("shard_tensor: data", data, meta)
    return data


def _reshard_dist_tensor(
    x: DistTensor, mesh: ProcessMesh, how: Any, dtype: torch.dtype | None,
    requires_grad: bool | None, src_rank: int | None,
) -> DistTensor:  # fmt: skip
    """Runs ``shard_tensor`` on a DistTensor. Without a layout it keeps its placements."""
    if src_rank is not None:
        raise ValueError(
            f"shard_tensor: src_rank={src_rank} of a DistTensor: no rank has another value of it"
        )
    if all(part is None for part in how):
        how = x.placements, None, None
    out: Any = reshard(x, mesh, how[0], dims_mapping=how[1], partial_status=how[2])
    out = out if dtype is None else out.to(dtype)
    if requires_grad is None or requires_grad == out.requires_grad:
        return out
    check_differentiable("shard_tensor", requires_grad, out.dtype)
    return out.detach().requires_grad_(requires_grad)


def _as_parameter(x: DistTensor, data: Any) -> Any:
    """Returns ``x``, as a Parameter if ``data`` is one."""
    is_param = isinstance(data, torch.nn.Parameter)
    return torch.nn.Parameter(x, x.requires_grad) if is_param else x


def _compare_some(value: Tensor, mesh: ProcessMesh) -> None:
    """Compares some elements of ``value`` at the calls 1, 2, 4, 8, ... of this line."""
    calls, line = current_runtime().entries, (mesh.ranks, user_place(sys._getframe(1)))
    calls[line] += 1
    if is_due(calls[line]):
        text = compare_values("shard_tensor", [value], mesh.group(tuple(range(mesh.ndim))))[0]
        if text:
            raise MismatchError(text)


def _compare(value: Tensor, mesh: ProcessMesh) -> None:
    group = mesh.group(tuple(range(mesh.ndim)))
    mine = (tuple(value.shape), str(value.dtype), objects.digest(value))
    everyone = objects.gather_objects(mine, group)
    different = [
        r for r, theirs in zip(group.ranks, everyone, strict=True) if theirs != everyone[0]
    ]
    if different:
        kind = "shape or dtype" if any(e[:2] != everyone[0][:2] for e in everyone) else "values"
        raise ValueError(
            f"shard_tensor(check=True): the {kind} of rank {', '.join(map(str, different))} differ "
            f"from those of rank {group.ranks[0]}; seed all ranks alike, or pass "
            f"src_rank={group.ranks[0]} to take one rank's data"
        )


def reshard(
    x: Any, mesh: ProcessMesh | None = None, placements: Sequence[Placement] | None = None, *,
    dims_mapping: Any = None, partial_status: Any = None,
) -> DistTensor:  # fmt: skip
    """Returns ``x`` in another layout, on its mesh or another one; differentiable. A regular tensor
    counts as replicated.

    To another mesh: every rank of the world makes the call, also ranks in neither mesh. Elements
    that a receiver does not hold come from ranks that do; gradients go back the same way.

    >>> x = dt.shard_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Replicate()])
    >>> dt.reshard(x, mesh, [dt.Replicate(), dt.Shard(1)]).dims_mapping
    [-1, 1]
    """
    if mesh is not None and not isinstance(mesh, ProcessMesh):
        mesh = as_mesh("reshard: mesh", mesh)
    if not isinstance(x, DistTensor):
        if mesh is None:
            raise ValueError("reshard of a regular tensor needs a mesh")
        return shard_tensor(
            x, mesh, placements, dims_mapping=dims_mapping, partial_status=partial_status
        )
    dst = target(x.spec, mesh or x.spec.mesh, placements, dims_mapping, partial_status)
    return start_reshard(x, dst)


def distribute_tensor(
    tensor: Any, device_mesh: Any = None, placements: Sequence[Placement] | None = None, *,
    src_data_rank: int | None = 0,
) -> DistTensor:  # fmt: skip
    """Runs ``shard_tensor`` on the data of one rank, as torch's ``distribute_tensor`` does.

    Args:
        tensor: the global tensor; only its shape and dtype matter on ranks that do not send it.
        device_mesh: a ProcessMesh or torch's DeviceMesh; None: a mesh of all ranks with one axis.
        placements: one for each mesh axis; None: replicated.
        src_data_rank: the place of the rank that sends its data, the same on every mesh axis.
            None: each rank uses its own data, which must be alike, and nothing is sent.

    Raises TypeError or ValueError for arguments that do not fit.

    >>> dt.distribute_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Shard(1)]).placements
    (Shard(0), Shard(1))
    """
    if device_mesh is None:
        device_mesh = mesh_of_all("d0")
    mesh, source = as_mesh("distribute_tensor: device_mesh", device_mesh), None
    if src_data_rank is not None and not isinstance(tensor, DistTensor):
        check_int("distribute_tensor: src_data_rank", src_data_rank, 0)
        if src_data_rank >= min(mesh.root.shape):
            raise ValueError(
                f"distribute_tensor: src_data_rank={src_data_rank}: {mesh.root!r} has an axis of "
                f"{min(mesh.root.shape)} rank(s)"
            )
        source = int(mesh.root.mesh[(src_data_rank,) * mesh.root.ndim])
    return shard_tensor(tensor, mesh, placements, src_rank=source)
