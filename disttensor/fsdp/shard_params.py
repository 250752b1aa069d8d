"""Puts the parameters of a module on its mesh and splits them over the shard axis, in place."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from disttensor.checks import has_own_operators
from disttensor.core.layout import Layout
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Replicate, Shard
from disttensor.core.spec import DistSpec
from disttensor.fsdp.replicas import broadcast_replicas, replicas_of
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import place
from disttensor.nn.shared_memory import replace_held
from disttensor.off_mesh import execute
from disttensor.tensor.base import as_parameter
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.user_facts import carry_over
from reshard import cross_mesh


def split_by(p: nn.Parameter, axis: str | None, mesh: ProcessMesh | None) -> bool:
    """Returns True if the plan of the model already splits ``p`` over the axis."""
    if axis is None or not isinstance(p, DistTensor):
        return False
    spec = spec_on(p, mesh)
    return spec.mesh.axis(axis) in spec.layout.varies()


def spec_on(p: DistTensor, mesh: ProcessMesh | None) -> DistSpec:
    """Returns the spec of ``p``, on ``mesh`` if both have the same root."""
    alike = mesh is not None and mesh.root is p.spec.mesh.root
    return p.spec.seen_from(mesh) if mesh is not None and alike else p.spec


def join_meshes(module: nn.Module, mesh: ProcessMesh, ignored: frozenset[int]) -> ProcessMesh:
    """Returns ``mesh`` with the axes of all meshes of its root that the module's tensors are on."""
    root, own = mesh.root, [s.value for s in slots(module) if id(s.value) not in ignored]
    meshes = [x.spec.mesh for x in own if isinstance(x, DistTensor)]
    axes = {a for m in [mesh, *meshes] if m.root is root for a in m.root_axes}
    if axes == set(mesh.root_axes):
        return mesh
    return root[tuple(root.dim_names[a] for a in sorted(axes))]


def meshes_of(
    module: nn.Module, mesh: ProcessMesh | None, ignored: frozenset[int]
) -> list[ProcessMesh]:
    params = [p for p in module.parameters() if id(p) not in ignored]
    own = [spec_on(p, mesh).mesh for p in params if isinstance(p, DistTensor)]
    return list(dict.fromkeys([*own, *([mesh] if mesh is not None else [])]))


def shard_params(
    module: nn.Module, mesh: ProcessMesh | None, shard_axis: str | None, ignored: frozenset[int],
    dims: dict[str, int],
) -> dict[str, DistTensor]:  # fmt: skip
    """Places regular tensors on ``mesh``, gives all replicas one value, splits the parameters by
    the axis, in all their slots, and returns them by name."""
    if mesh is not None:
        _place(module, mesh, shard_axis, ignored, dims)
    before = [slot for slot in slots(module) if id(slot.value) not in ignored]
    meshes = meshes_of(module, mesh, ignored)
    broadcast_replicas(t for s in before for t in replicas_of(s.value, meshes))
    made: dict[int, DistTensor] = {}
    sharded: dict[str, DistTensor] = {}
    for slot in before:
        if slot.table is not slot.owner._parameters or not isinstance(slot.value, DistTensor):
            continue
        p: Any = slot.value
        if id(p) not in made:
            made[id(p)] = p
            if shard_axis is not None:
                made[id(p)] = _shard(p, p.spec.mesh.axis(shard_axis), dims.get(slot.name, 0))
            if made[id(p)] is not p:
                what = f"shard_data_parallel split {slot.name!r} into shards"
                carry_over(p, made[id(p)], what)
        slot.table[slot.key] = sharded[slot.name] = made[id(p)]
    replace_held(module, made)
    return sharded


def _place(
    module: nn.Module, mesh: ProcessMesh, shard_axis: str | None, ignored: frozenset[int],
    dims: dict[str, int],
) -> None:  # fmt: skip
    """Makes DistTensors of regular tensors; tensors on the meta device are made as shards."""
    plan: dict[Any, Any] = {}
    if shard_axis is not None:
        for name, p in module.named_parameters():
            if p.is_meta and p.ndim and id(p) not in ignored and not isinstance(p, DistTensor):
                split = mesh.axis(shard_axis)
                dim = Shard(dims.get(name, 0))
                plan[name] = [dim if a == split else Replicate() for a in range(mesh.ndim)]
    before = slots(module)
    if any(not isinstance(s.value, DistTensor) for s in before):
        mesh_of: Any = lambda x: None if id(x) in ignored else mesh  # noqa: E731
        place(module, before, mesh_of, plan, None, one_value=False)  # replicas are broadcast next
    made: dict[int, DistTensor] = {}
    placed = [s for s in slots(module) if isinstance(s.value, DistTensor)]
    mine = [s for s in placed if id(s.value) not in ignored and not has_own_operators(s.value)]
    brought = [s for s in mine if spec_on(s.value, mesh) is not s.value.spec]  # type: ignore
    for slot in brought:  # from sub-meshes
        x: Any = slot.value
        if id(x) not in made:
            moved = wrap(x.local.detach().requires_grad_(x.requires_grad), spec_on(x, mesh))
            made[id(x)] = as_parameter(moved) if isinstance(x, nn.Parameter) else moved
            what = f"shard_data_parallel brought {slot.name!r} to {mesh!r}"
            carry_over(x, made[id(x)], what)
        slot.table[slot.key] = made[id(x)]
    replace_held(module, made)


def _shard(p: DistTensor, axis: int, dim: int) -> DistTensor:
    """Returns ``p`` split along ``dim`` by one more mesh axis, the minor one there."""
    spec = p.spec
    if not spec.ndim or not math.prod(spec.shape) or axis in spec.layout.sharded:
        return p
    dims = tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(spec.layout.dims))
    dst: DistSpec = spec.with_layout(Layout(dims, spec.layout.partial))
    if not p.is_initialized:
        new = execute.off_mesh_leaf(dst, p.requires_grad)
    else:
        local = cross_mesh.run(p.local.detach(), spec, dst).clone()
        new = wrap(local.requires_grad_(p.requires_grad), dst)
    return as_parameter(new)
