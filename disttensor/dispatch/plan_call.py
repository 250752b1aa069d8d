"""Plans a call whose rule is known: ``resolve.Plan`` -> ``CallPlan``, on the mesh or off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.comm.process_group import world
from disttensor.core.layout import Layout, replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import CONSTANT, CallPlan, Origin, Read, ReadKind
from disttensor.dispatch.resolve import RulePlan
from disttensor.dispatch.writes import is_untracked
from disttensor.meta import execute, infer
from disttensor.pytree import collect
from disttensor.random.state import IDLE
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import is_local_relabel
from disttensor.torch_private import autocast_is_on

Tensor = torch.Tensor
Function = Callable[..., Any]


def plan_call(plan: RulePlan) -> CallPlan:
    """Returns the CallPlan of calls like the call that was resolved."""
    (args, kwargs, order), func = plan.form, plan.func
    reuses, wholes = plan.reuses, plan.reduces
    options: dict[str, Any] = {"order": order}
    if any(reuses):
        options["may_reuse"] = tuple(reuses)
        if any(wholes):
            options["reduce_first"] = tuple([
                s.with_layout(Layout(s.layout.dims)) if now else None
                for s, now in zip(plan.specs, wholes, strict=True)
            ])  # fmt: skip
    mesh, inplace, is_view = plan.mesh, plan.rule.inplace, plan.factors.view
    if mesh.coordinate is None:
        layouts = None if inplace else tuple(plan.decision.output_layouts)
        return plan_off_mesh(func, mesh, layouts, args, kwargs, inplace, **options)
    tensors = collect((args, kwargs), [])
    reads = reads_of(plan, args, kwargs)
    is_flat = all(r.kind <= ReadKind.TENSOR for r in reads)
    has_regular = any(r.regular for r in reads)
    moves = zip(plan.specs, plan.input_specs, strict=True)
    is_one = len(plan.output_specs) == 1
    varies = plan.output_specs[0].varies if plan.output_specs else frozenset()
    may_vary = any(n > 1 and a not in varies for a, n in enumerate(mesh.shape))
    stays = is_flat and not (plan.redistributes or plan.any_varying)
    is_first = len(tensors) == 1 and bool(args) and args[0] is tensors[0]
    is_simple_view = stays and is_one and is_first
    origin = Origin.NONE
    if is_view and is_one and not plan.redistributes and (may_vary or not is_simple_view):
        origin = Origin.VIEW
    elif plan.factors.rematerialize and may_vary and stays:
        origin = Origin.REPEAT
    sends_shape = infer.is_dynamic(func, args, kwargs) and mesh.root.size < world()[1]
    return CallPlan(
        func, mesh, plan.local_fn(), tuple(plan.specs), reads, tuple(kwargs),
        () if inplace else tuple(plan.output_specs),
        input_specs=tuple(plan.input_specs) if plan.redistributes else (),
        is_view=is_view,
        is_copy=any(w is not None and not is_local_relabel(s, w) for s, w in moves),
        origin=origin,
        writes=tuple(plan.factors.targets) if inplace else None,
        untracked_writes=inplace and is_untracked(func),
        broadcasts_shape=sends_shape,
        native=not (
            plan.redistributes or sends_shape or (inplace and not args)
            or (is_view and is_one and not is_simple_view)
            or has_regular or "reduce_first" in options
        ),
        is_simple=(
            is_flat and is_one and not plan.redistributes and origin is Origin.NONE
            and not (inplace or is_view or sends_shape or has_regular or any(reuses))
        ),
        is_checked=inplace,
        **options,
    )  # fmt: skip


def reads_of(plan: RulePlan, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Read, ...]:
    """Returns a Read for each argument: how the local function receives it."""
    tensors = iter(zip(plan.input_specs, plan.varying_axes, plan.specs, strict=True))

    def read(t: Tensor) -> Read:
        spec, varying, own = next(tensors)
        if type(t) is DistTensor:
            return Read(ReadKind.TENSOR, spec, varying)
        return Read(ReadKind.TENSOR, spec, varying, own) if spec or varying else CONSTANT

    reads = []
    for value in (*args, *kwargs.values()):
        found = [read(t) for t in collect(value, [])]
        if isinstance(value, Tensor) or not found:
            reads.append(found[0] if found else CONSTANT)
        elif any(r.spec for r in found):
            reads.append(Read(ReadKind.TREE, elements=tuple(found)))
        else:
            elements = tuple(found) if any(r.varying for r in found) else ()
            reads.append(Read(ReadKind.LIST, elements=elements))
    return tuple(reads)


# Off the mesh ---------------------------------------------------------------------------------


def plan_off_mesh(
    func: Function, mesh: ProcessMesh, layouts: tuple[Layout, ...] | None, args: Sequence[Any],
    kwargs: dict[str, Any], writes: bool, **options: Any,
) -> CallPlan:  # fmt: skip
    """Returns the CallPlan for a rank off the mesh.

    Args:
        layouts: of the results; None for a call in place, whose target keeps its layout.
        writes: True if the first argument is written in place.
        options: ``order``, ``may_reuse`` and ``reduce_first`` of the plan.
    """
    found = execute.metadata_of_results(func, mesh, args, kwargs)
    draws: Any = IDLE.get(getattr(func, "__name__", "").rstrip("_"))
    if draws is not None and _by_key(args, kwargs):
        draws = not draws(*args, **kwargs)
    tensors = collect((args, kwargs), [])
    outs = [] if found is None else found.outs
    specs = tuple([
        DistSpec(
            mesh, replicated(len(o.shape)) if layouts is None else layouts[i], o.shape, o.dtype
        )
        for i, o in enumerate(outs)
    ])  # fmt: skip
    draws = (found is not None and found.draws) if draws is None else draws
    template: Any = None if found is None else found.result
    dtype = autocast_dtype(mesh)
    several: Any = template if type(template) in (tuple, list) else [template]
    values = (*args, *kwargs.values())
    native = (
        not (writes or draws or "reduce_first" in options) and dtype is None and bool(outs)
        and all(type(o) is infer.TensorResult and o.same is None for o in several)
        and all(o.sources == outs[0].sources for o in outs)
        and all(type(t) is DistTensor for t in tensors)
        and sum(isinstance(a, Tensor) for a in values) == len(tensors)
    )  # fmt: skip
    reads = tuple([Read(ReadKind.TENSOR) if isinstance(a, Tensor) else CONSTANT for a in values])
    plan = CallPlan(
        func, mesh, None, tuple([t.spec for t in tensors if type(t) is DistTensor]), reads,
        tuple(kwargs), specs, template=template, writes=(0,) if writes else None,
        draws=draws, broadcasts_shape=found is None, native=native, **options,
    )  # fmt: skip
    plan.autocast[dtype] = plan
    return plan


def autocast_dtype(mesh: ProcessMesh) -> torch.dtype | None:
    """Returns the dtype of autocast on the device type of this mesh; None: autocast is off."""
    kind = mesh.device.type
    on = autocast_is_on() and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def plan_under_autocast(plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> CallPlan:
    """Returns the plan of a call off the mesh under the current autocast, which decides dtypes."""
    dtype = autocast_dtype(plan.mesh)
    found = plan.autocast.get(dtype)
    if found is None:
        layouts, writes = tuple([s.layout for s in plan.results]), plan.writes is not None
        found = plan_off_mesh(plan.func, plan.mesh, layouts, args, kwargs, writes)
        plan.autocast[dtype] = found
    return found


def _by_key(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if all calls of this key have the same arguments, but for the data of
    DistTensors: a key contains only the type of a float, and no data of a regular tensor."""
    values = (*args, *kwargs.values())
    return all(type(v) in (DistTensor, int, bool, str, type(None)) for v in values)
