"""shard_data_parallel: the state of a module spread over the ranks of a mesh axis, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from disttensor.autograd.accumulation import BackwardContext
from disttensor.checks import (
    argument_error,
    check_bool,
    check_callable,
    check_int,
    check_sequence,
    check_type,
    has_own_operators,
)
from disttensor.comm import collectives
from disttensor.core.layout import Layout
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Replicate, Shard
from disttensor.core.spec import DistSpec
from disttensor.experts.expert_plan import expert_tensors
from disttensor.fsdp.engine import Engine
from disttensor.fsdp.mixed_precision import Policies, Policy, check_dtypes
from disttensor.fsdp.module_tree import SegmentSpec
from disttensor.fsdp.param import FSDPParam
from disttensor.fsdp.replicas import broadcast_replicas, replicas_of
from disttensor.fsdp.segment import Segment
from disttensor.fsdp.segment_policy import SegmentBySize, Segments, segments_of
from disttensor.meta import execute
from disttensor.nn.parameters import Slot, slots
from disttensor.nn.shard_module import a_module, check_subclasses, place
from disttensor.tensor.base import as_parameter
from disttensor.tensor.dist_tensor import DistTensor, wrap
from reshard import cross_mesh

SHARDS, REPLICAS = SegmentBySize(32.0), SegmentBySize(25.0)  # unless segments are given
_ENGINE = "_data_parallel"  # the attribute of a module that holds its Engine


def shard_data_parallel(
    module: nn.Module, mesh: ProcessMesh | None = None, shard_axis: str | None = "fsdp",
    replicate_axis: str | None = None,
    stage: int = 3, segments: Segments | None = None, reshard_after_forward: bool = True,
    prefetch: int = 1,
    param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
    ignored_params: Iterable[nn.Parameter] = (),
    mp_policy: Any = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
) -> nn.Module:  # fmt: skip
    """Shards the training state of ``module`` over ``shard_axis`` in place, and returns it.

    Every parameter becomes a DistTensor split along dim 0 over the axis (in addition to splits by
    tensor parallelism). The optimizer, built after this call, and ``state_dict`` see the shards.
    During a forward or backward of its segment, the module holds the unsharded parameter. Experts
    that the axis already splits stay unchanged. Values come from the first rank of the mesh.

    Args:
        module: a model, or a part of one.
        mesh: the mesh of regular parameters; None if all are DistTensors, each on its own mesh (of
            a pipeline stage). It may be a sub-mesh next to the sub-mesh of tensor parallelism, as
            ``mesh["dp"]`` and ``mesh["tp"]``: all parameters and buffers are then on
            ``mesh["dp", "tp"]``, and the inputs must be, too.
        shard_axis: the axis that splits. None: nothing is sharded; gradients are reduced in
            segments during the backward.
        replicate_axis: an additional axis of replicas (HSDP); it only has to exist. Gradients are
            summed over all axes over which they are Partial, under any name.
        stage: 1: the optimizer's state is sharded; unsharded parameters are kept, gradients
            all-reduced. 2: gradients too (reduce-scattered, half the bytes). 3: parameters too:
            gathered per segment before use, freed after the forward, gathered again for the
            backward.
        segments: parameters that are gathered and reduced at once: SegmentBySize (the default:
            32 MiB, 25 with ``shard_axis=None``), SegmentByAnchors, or names of modules. A list of
            names among these is one segment of several modules.
        reshard_after_forward: False: parameters of stage 3 stay gathered until the backward ends.
        prefetch: the number of segments that are gathered ahead of their use.
        param_dtype: of unsharded parameters and of floating arguments of the modules; the sharded
            parameters keep theirs.
        reduce_dtype: of sums between ranks (the default: ``param_dtype``). Gradients add up in the
            dtype of the sharded parameters.
        offload: shards are in the memory of the host; on a CPU mesh they are there already.
        ignored_params: parameters that stay unchanged, with their devices, dtypes and values. A
            regular one counts as replicated: its gradient is whole on every rank.
        mp_policy: a MixedPrecisionPolicy of torch.distributed.fsdp for the module, or a dict of
            policies by names or globs of modules. The policy of a module applies to the modules in
            it that have none. Floating arguments of the named modules, and of modules whose
            segments are gathered, are cast to ``param_dtype`` (unless ``cast_forward_inputs`` is
            False), floating results of the named modules to ``output_dtype``.
        shard_placement_fn: returns the Shard along which a parameter is split, or None: Shard(0).

    Returns:
        ``module``.

    Raises:
        ValueError: an axis, a stage or segments do not fit; before any change.
        NotImplementedError: ``offload`` with a mesh of accelerators.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> model = dt.shard_data_parallel(model, mesh, shard_axis="dp", stage=3)
    >>> model[0].weight.placements
    (Shard(0), Replicate())
    """
    if segments is None:
        segments = REPLICAS if shard_axis is None else SHARDS
    check_bool("shard_data_parallel: reshard_after_forward", reshard_after_forward)
    check_bool("shard_data_parallel: offload", offload)
    check_dtypes("shard_data_parallel", param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    a_module("shard_data_parallel: module", module)
    ignored = _ignored(module, ignored_params)
    policies = Policies(module, mp_policy, Policy(param_dtype, reduce_dtype))
    if mesh is not None:
        mesh = as_mesh("shard_data_parallel: mesh", mesh)
        mesh = _joined(module, mesh, ignored)
    specs = _checked(module, mesh, shard_axis, replicate_axis, stage, segments, prefetch, ignored)
    if offload and any(m.device_type != "cpu" for m in _meshes(module, mesh, ignored)):
        raise NotImplementedError(
            "shard_data_parallel(offload=True): shards in the memory of the host, with a mesh of "
            "accelerators, are not implemented; on a CPU mesh they are there already"
        )
    dims = _shard_dims(module, shard_placement_fn, shard_axis, ignored)
    names = {id(p): name for name, p in module.named_parameters()}
    owned = [p for p in module.parameters() if id(p) not in ignored]
    split = {names[id(p)] for p in owned if _split_by(p, shard_axis, mesh)}
    if mesh is not None:
        _place(module, mesh, shard_axis, ignored, dims)
    before = [slot for slot in slots(module) if id(slot.value) not in ignored]
    meshes = _meshes(module, mesh, ignored)
    broadcast_replicas(t for s in before for t in replicas_of(s.value, meshes))
    sharded = _shard_all(module, before, shard_axis, dims)
    places: dict[int, list[Slot]] = {}
    for slot in slots(module):
        places.setdefault(id(slot.value), []).append(slot)

    def param_of(value: torch.Tensor) -> FSDPParam:
        name = names[id(value)]
        p = sharded[name]
        axis = None
        if shard_axis is not None and name not in split:
            axis = p.spec.mesh.axis(shard_axis)
        policy = policies.of[places[id(p)][0].owner]
        dtype = (p.dtype.is_floating_point and policy.param_dtype) or p.dtype
        return FSDPParam(name, p, places[id(p)], axis, dtype, policy.reduce_dtype or dtype)

    segments_here = []
    for spec in specs:
        # A backward can enter a module that several stages run in at any of its nodes, so there is
        # no point at which to gather.
        persist = stage < 3 or any(len(_meshes(m, None, ignored)) > 1 for m in spec.modules)
        brief = not persist and reshard_after_forward
        segments_here.append(
            Segment(
                spec.name, spec.modules, [param_of(value) for value in spec.params],
                persist=persist, free_after_forward=brief and module not in spec.modules,
                is_brief=brief,
            )
        )  # fmt: skip
    engine = module.__dict__[_ENGINE] = Engine(segments_here, scatter=stage > 1, prefetch=prefetch)
    engine.add_hooks(module)
    policies.add_hooks(m for spec in specs for m in spec.modules)
    return module


def is_sharded(module: nn.Module) -> bool:
    """Returns True if ``shard_data_parallel`` was called for this module."""
    return _ENGINE in module.__dict__


def _checked(
    module: nn.Module, mesh: ProcessMesh | None, shard_axis: str | None, replicate_axis: str | None,
    stage: int,
    segments: Segments, prefetch: int, ignored: frozenset[int],
) -> list[SegmentSpec]:  # fmt: skip
    """Checks the arguments, and returns the segments."""
    who = "shard_data_parallel"
    if stage not in (1, 2, 3) or type(stage) is not int:
        raise ValueError(
            f"{who}: stage={stage!r}: 1 spreads the optimizer's state, 2 the gradients too, 3 the "
            "parameters too"
        )
    check_int(f"{who}: prefetch", prefetch, 0, "a number of segments")
    if any(is_sharded(m) for m in module.modules()):
        raise ValueError(f"{who}: the module, or one in it, is under shard_data_parallel already")
    if shard_axis is not None and shard_axis == replicate_axis:
        raise ValueError(f"{who}: {shard_axis!r} is both shard_axis and replicate_axis")
    check_subclasses(who, module, {})
    params = {
        name: p
        for name, p in module.named_parameters()
        if not has_own_operators(p) and id(p) not in ignored
    }
    plain = [name for name, p in params.items() if not isinstance(p, DistTensor)]
    if mesh is None and plain:
        raise ValueError(
            f"{who}: parameter {plain[0]!r} is a regular tensor: give mesh=, on which to shard it"
        )
    meshes = _meshes(module, mesh, ignored)
    world = collectives.world_group().size if ignored else 1
    some_rank_is_off = any(m.root.size < world for m in meshes) or len(meshes) > 1
    for name, p in module.named_parameters() if some_rank_is_off else ():
        if id(p) in ignored and p.requires_grad and not isinstance(p, DistTensor):
            raise ValueError(
                f"{who}: ignored_params: {name!r} is a regular tensor that requires grad, and not "
                f"all ranks would get its gradient, as the other parameters lie on {meshes}. "
                "Freeze it, or place it on one mesh with dt.shard_tensor"
            )
    for m in meshes:
        for axis in (shard_axis, replicate_axis):
            if axis is not None:
                m.axis(axis)
    experts = expert_tensors(module)
    for name, p in params.items():
        if p.grad is not None:
            raise ValueError(f"{who}: parameter {name!r} has a gradient: zero_grad() first")
        if not isinstance(p, DistTensor):
            continue
        if _split_by(p, shard_axis, mesh) and name not in experts:
            raise ValueError(
                f"{who}: parameter {name!r} is {p.spec!r}: {shard_axis!r} splits it already, which "
                "is allowed for experts only"
            )
        if p.spec.layout.custom:
            raise ValueError(f"{who}: parameter {name!r} is {p.spec!r}, of a placement of your own")
    return segments_of(module, segments, ignored)


def _ignored(module: nn.Module, params: Any) -> frozenset[int]:
    """Checks ``ignored_params``, and returns their ids."""
    who, expected = "shard_data_parallel: ignored_params", "a set of parameters of the module"
    own = set(map(id, module.parameters()))
    if isinstance(params, torch.Tensor):
        raise argument_error(who, params, expected)
    for p in (listed := check_sequence(who, params, expected)):
        check_type(f"{who}: an entry", p, nn.Parameter, expected)
        if id(p) not in own:
            raise ValueError(
                f"{who}: a parameter of shape {tuple(p.shape)} is none of "
                f"{type(module).__name__}. Take it from the module as it is now: shard_module and "
                "Module.to may have made others"
            )
    return frozenset(map(id, listed))


def _split_by(p: nn.Parameter, axis: str | None, mesh: ProcessMesh | None) -> bool:
    """Returns True if the plan of the model already splits ``p`` over the axis."""
    if axis is None or not isinstance(p, DistTensor):
        return False
    spec = _spec_on(p, mesh)
    return spec.mesh.axis(axis) in spec.layout.varies()


def _spec_on(p: DistTensor, mesh: ProcessMesh | None) -> DistSpec:
    """Returns the spec of ``p``, on ``mesh`` if both have the same root."""
    alike = mesh is not None and mesh.root is p.spec.mesh.root
    return p.spec.seen_from(mesh) if mesh is not None and alike else p.spec


def _shard_dims(
    module: nn.Module, function: Any, shard_axis: str | None, ignored: frozenset[int]
) -> dict[str, int]:
    """Maps parameter names to the dims that ``shard_placement_fn`` returns, leaving out None."""
    who = "shard_data_parallel: shard_placement_fn"
    if function is None:
        return {}
    check_callable(who, function, "a function of a parameter")
    if shard_axis is None:
        raise ValueError(f"{who}: nothing is sharded, as shard_axis is None: leave it out")
    dims: dict[str, int] = {}
    for name, p in module.named_parameters():
        placement = None if id(p) in ignored or has_own_operators(p) else function(p)
        if placement is None:
            continue
        if type(placement) is not Shard or not -p.ndim <= placement.dim < p.ndim:
            raise argument_error(
                f"{who}({name})", placement, f"Shard(dim) of a parameter of {p.ndim} dims, or None,"
            )
        dims[name] = placement.dim % p.ndim
    return dims


def _joined(module: nn.Module, mesh: ProcessMesh, ignored: frozenset[int]) -> ProcessMesh:
    """Returns ``mesh`` with the axes of all meshes of its root that the module's tensors are on."""
    root, own = mesh.root, [s.value for s in slots(module) if id(s.value) not in ignored]
    meshes = [x.spec.mesh for x in own if isinstance(x, DistTensor)]
    axes = {a for m in [mesh, *meshes] if m.root is root for a in m.root_axes}
    if axes == set(mesh.root_axes):
        return mesh
    return root[tuple(root.dim_names[a] for a in sorted(axes))]


def _meshes(
    module: nn.Module, mesh: ProcessMesh | None, ignored: frozenset[int]
) -> list[ProcessMesh]:
    params = [p for p in module.parameters() if id(p) not in ignored]
    own = [_spec_on(p, mesh).mesh for p in params if isinstance(p, DistTensor)]
    return list(dict.fromkeys([*own, *([mesh] if mesh is not None else [])]))


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
        place(module, before, lambda x: None if id(x) in ignored else mesh, plan, None)
    made: dict[int, DistTensor] = {}
    for slot in slots(module):  # from sub-meshes
        x: Any = slot.value
        if id(x) in ignored or has_own_operators(x):  # left unchanged
            continue
        spec = _spec_on(x, mesh)
        if spec is not x.spec and id(x) not in made:
            moved = wrap(x.local.detach().requires_grad_(x.requires_grad), spec)
            made[id(x)] = as_parameter(moved) if isinstance(x, nn.Parameter) else moved
            x._replaced = f"shard_data_parallel brought them to {mesh!r}"
        slot.table[slot.key] = made.get(id(x), x)


def _shard_all(
    module: nn.Module, before: Iterable[Slot], shard_axis: str | None, dims: dict[str, int]
) -> dict[str, DistTensor]:
    """Splits the parameters by the axis, in all their slots, and returns them by name."""
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
                p._replaced = "shard_data_parallel split them into shards"
        slot.table[slot.key] = sharded[slot.name] = made[id(p)]
    return sharded


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


@contextmanager
def accumulate(module: nn.Module, last: bool, reduce: str = "scatter") -> Iterator[None]:
    """Accumulates gradients of several micro-batches until the backward with ``last``.

    ``reduce="scatter"``: each backward reduce-scatters over the shard axis and adds to the sharded
    sum; only the last reduces over all other axes, after adding. ``"none"``: only the last
    communicates, and unsharded gradients are kept; ``p.grad`` is their sum so far, Partial on the
    shard axis too. An optimizer's step and ``sync_gradients`` reduce it if no last backward comes.
    Without this context every backward reduces completely. Micro-batches may reach different
    parameters. A segment that the last one does not reach is reduced when the context ends.

    >>> model = dt.shard_data_parallel(torch.nn.Linear(4, 1), mesh, shard_axis="dp")
    >>> for i, batch in enumerate(torch.ones(2, 3, 4)):
    ...     with dt.accumulate(model, last=i == 1):
    ...         model(dt.shard_tensor(batch, mesh, [dt.Shard(0), dt.Replicate()])).sum().backward()
    >>> model.bias.grad.item()
    6.0
    """
    if reduce not in ("scatter", "none"):
        raise ValueError(
            f'accumulate: reduce={reduce!r}: "scatter" (to shards each time) or "none" (all at the '
            "last)"
        )
    a_module("accumulate: module", module)
    check_bool("accumulate: last", last)
    engines = [m.__dict__[_ENGINE] for m in module.modules() if _ENGINE in m.__dict__]
    if not engines and not any(isinstance(p, DistTensor) for p in module.parameters()):
        raise ValueError(
            f"accumulate: {type(module).__name__} holds no DistTensor: give the module that "
            "shard_data_parallel gave"
        )
    before = [engine.context for engine in engines]
    for engine in engines:
        engine.context = BackwardContext(last, reduce)
    try:
        yield
        for engine in engines if last else ():
            engine.flush()
    finally:
        for engine, context in zip(engines, before, strict=True):
            engine.context = context
