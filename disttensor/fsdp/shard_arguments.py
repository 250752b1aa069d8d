"""Checks the arguments of shard_data_parallel, before anything is changed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from disttensor.checks import (
    argument_error,
    check_callable,
    check_int,
    check_sequence,
    check_type,
    has_own_operators,
)
from disttensor.comm.groups import world_group
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Shard
from disttensor.experts.expert_plan import expert_tensors
from disttensor.fsdp.engine import ENGINE, engines
from disttensor.fsdp.module_tree import SegmentSpec
from disttensor.fsdp.segment_policy import Segments, segments_of
from disttensor.fsdp.shard_params import meshes_of, split_by
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import check_sizes, check_subclasses
from disttensor.nn.shared_memory import check_memory
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.user_facts import compare_placed, compared, hooks_of


def params_inside(module: nn.Module, stage: int) -> frozenset[int]:
    """Returns the ids of the parameters that earlier calls for modules in ``module`` have sharded.

    Raises ValueError for a call for ``module`` itself, and for calls that do not fit together.
    """
    who = "shard_data_parallel"
    inside = {n: m.__dict__[ENGINE] for n, m in module.named_modules() if ENGINE in m.__dict__}
    if "" in inside:
        raise ValueError(f"{who}: {type(module).__name__} is sharded already, by an earlier call")
    found = {id(p.sharded_param): p for e in inside.values() for p in e.params()}
    around = [p for e in engines() if e not in inside.values() for p in e.params()]
    names = {id(p): name for name, p in module.named_parameters()}
    for name in [names[id(p.sharded_param)] for p in around if id(p.sharded_param) in names]:
        raise ValueError(
            f"{who}: parameter {name!r} is sharded already, by a call for a module around: call it "
            "for the inner modules first"
        )
    for name, engine in inside.items():
        if engine.scatter is not (stage != 1):
            raise ValueError(
                f"{who}: stage={stage}: {name!r} in it was sharded with "
                f"{'stage 2 or 3' if engine.scatter else 'stage 1'}; give both calls the same stage"
            )
    places = [slot for slot in slots(module) if inside]
    for slot in places:
        param, what = found.get(id(slot.value)), getattr(slot.value, "_replaced", None)
        if param is not None and len(param.slots) != sum(s.value is slot.value for s in places):
            what = "it is a parameter of a module that was sharded by an earlier call"
        if what is not None:
            raise ValueError(
                f"{who}: parameter {slot.name!r} is tied: {what}. Shard modules that share a "
                "parameter in one call, with segments=[['first', 'second'], ...]"
            )
    return frozenset(found)


def check_arguments(
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
    if shard_axis is not None and shard_axis == replicate_axis:
        raise ValueError(f"{who}: {shard_axis!r} is both shard_axis and replicate_axis")
    check_sizes(who, dict((*module.named_parameters(), *module.named_buffers())))
    check_subclasses(who, module, {}, lambda value: id(value) in ignored)
    check_memory(who, module, lambda value: id(value) in ignored)
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
    meshes = meshes_of(module, mesh, ignored)
    world = world_group().size if ignored else 1
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
        if split_by(p, shard_axis, mesh) and name not in experts:
            raise ValueError(
                f"{who}: parameter {name!r} is {p.spec!r}: {shard_axis!r} splits it already, which "
                "is allowed for experts only"
            )
        if p.spec.layout.custom:
            raise ValueError(f"{who}: parameter {name!r} is {p.spec!r}, of a placement of your own")
    return segments_of(module, segments, ignored)


def check_hooks(
    who: str, module: nn.Module, mesh: ProcessMesh | None, collects: bool = True,
    ignored: frozenset[int] = frozenset(), values: bool = False,
) -> AbstractContextManager[None]:  # fmt: skip
    """Compares what the ranks put on the tensors that will be placed on ``mesh``, before anything
    is changed. Returns the context for placing them, in which the ranks compare nothing again.

    ``collects``: copies will collect the gradients of parameters; raises ValueError for a hook that
    needs the gradient of one backward before it is added up. ``values``: see ``compare_placed``.
    """

    def mesh_of(x: Any) -> ProcessMesh | None:
        on_stage = isinstance(x, DistTensor) and (mesh is None or x.spec.mesh.root.size < mesh.size)
        return x.spec.mesh if on_stage else mesh

    owned = [s for s in slots(module) if id(s.value) not in ignored]
    placed = [(s.name, s.value, mesh_of(s.value)) for s in owned if not has_own_operators(s.value)]
    differing = bool(compare_placed(who, placed, values))
    for name, p, _ in placed if collects else ():
        if isinstance(p, nn.Parameter) and hooks_of(p)[0]:
            raise ValueError(
                f"{who}: parameter {name!r} has a hook (register_hook), and its "
                "gradient collects on a temporary copy, so the hook would not be called. Remove "
                "it, and change p.grad in register_post_accumulate_grad_hook"
            )
    return compared(differing)


def check_ignored(module: nn.Module, params: Any) -> frozenset[int]:
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
                "Module.to may have replaced its parameters"
            )
    return frozenset(map(id, listed))


def shard_dims(
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
