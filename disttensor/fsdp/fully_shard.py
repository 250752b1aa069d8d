"""shard_data_parallel: the state of a module spread over the ranks of a mesh axis, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from disttensor.checks import check_bool
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Shard
from disttensor.fsdp.engine import ENGINE, SEGMENTS, Engine
from disttensor.fsdp.mixed_precision import Policies, Policy, check_dtypes
from disttensor.fsdp.module_tree import SegmentSpec
from disttensor.fsdp.param import FSDPParam
from disttensor.fsdp.segment import Segment
from disttensor.fsdp.segment_policy import SegmentBySize, Segments
from disttensor.fsdp.shard_arguments import (
    check_arguments,
    check_hooks,
    check_ignored,
    params_inside,
    shard_dims,
)
from disttensor.fsdp.shard_params import join_meshes, meshes_of, shard_params, split_by
from disttensor.nn.parameters import Slot, slots
from disttensor.nn.shard_module import check_module

SHARDS, REPLICAS = SegmentBySize(32.0), SegmentBySize(25.0)  # unless segments are given


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
        module: a model, or a part of one. Modules in it that earlier calls have sharded, with the
            same stage, keep their segments.
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
    check_module("shard_data_parallel: module", module)
    ignored = check_ignored(module, ignored_params) | params_inside(module, stage)
    policies = Policies(module, mp_policy, Policy(param_dtype, reduce_dtype))
    if mesh is not None:
        mesh = as_mesh("shard_data_parallel: mesh", mesh)
        mesh = join_meshes(module, mesh, ignored)
    specs = check_arguments(
        module, mesh, shard_axis, replicate_axis, stage, segments, prefetch, ignored
    )
    if offload and any(m.device_type != "cpu" for m in meshes_of(module, mesh, ignored)):
        raise NotImplementedError(
            "shard_data_parallel(offload=True): shards in the memory of the host, with a mesh of "
            "accelerators, are not implemented; on a CPU mesh they are there already"
        )
    dims = shard_dims(module, shard_placement_fn, shard_axis, ignored)
    collects = shard_axis is not None or any(p.param_dtype for p in policies.of.values())
    placing = check_hooks("shard_data_parallel", module, mesh, collects, ignored)
    names = {id(p): name for name, p in module.named_parameters()}
    owned = [p for p in module.parameters() if id(p) not in ignored]
    split = {names[id(p)] for p in owned if split_by(p, shard_axis, mesh)}
    with placing:
        sharded = shard_params(module, mesh, shard_axis, ignored, dims)
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
        # dtypes of a policy are real ones; numbers of 8 bits belong to a scale in another tensor
        if not p.dtype.is_floating_point or p.dtype.itemsize == 1:
            return FSDPParam(name, p, places[id(p)], axis, p.dtype, p.dtype)
        dtype = policy.param_dtype or p.dtype
        return FSDPParam(name, p, places[id(p)], axis, dtype, policy.reduce_dtype or dtype)

    def segment_of(spec: SegmentSpec) -> Segment:
        # A backward can enter a module that several stages run in at any of its nodes, so there is
        # no point at which to gather.
        persist = stage < 3 or any(len(meshes_of(m, None, ignored)) > 1 for m in spec.modules)
        brief = not persist and reshard_after_forward
        return Segment(
            spec.name, spec.modules, [param_of(value) for value in spec.params], persist=persist,
            free_after_forward=brief and module not in spec.modules, uses_memory_pool=brief,
        )  # fmt: skip

    made = module.__dict__[SEGMENTS] = [segment_of(spec) for spec in specs]
    order = {m: number for number, m in enumerate(module.modules())}
    inside = [m.__dict__.pop(ENGINE) for m in order if ENGINE in m.__dict__]
    segments_in = [*made, *[s for engine in inside for s in engine.release()]]
    segments_in.sort(key=lambda s: min(order[m] for m in s.modules))
    engine = module.__dict__[ENGINE] = Engine(
        segments_in, scatter=stage > 1, prefetch=max([prefetch, *[e.prefetch for e in inside]])
    )
    engine.add_hooks(module)
    policies.add_hooks(m for spec in specs for m in spec.modules)
    return module
