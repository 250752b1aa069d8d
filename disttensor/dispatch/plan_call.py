"""Plans a call whose rule is known: ``RulePlan`` -> ``CallPlan``, on the mesh or off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.comm.process_group import world
from disttensor.core.layout import Layout, replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import CONSTANT, CallPlan, Read, ReadKind
from disttensor.dispatch.resolve import RulePlan
from disttensor.dispatch.writes import first_of, is_untracked
from disttensor.meta import execute
from disttensor.pytree import collect
from disttensor.random.state import DRAWS_NOTHING
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import is_local_relabel
from ops.answer import TensorResult, is_dynamic, surroundings

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
    is_part = mesh.root.size < world()[1]
    # a write to a regular tensor, which ranks off the mesh may be sent (``values_everywhere``)
    written = collect(first_of(args, kwargs), []) if inplace and is_part else []
    has_regular = any(r.regular for r in reads) or any(type(x) is not DistTensor for x in written)
    moved = [
        w is not None and not is_local_relabel(s, w)
        for s, w in zip(plan.specs, plan.input_specs, strict=True)
    ]
    views = tuple([None if i is None else (i, moved[i]) for i in plan.factors.views])
    is_one = len(plan.output_specs) == 1
    varies = plan.output_specs[0].varies if plan.output_specs else frozenset()
    may_vary = any(n > 1 and a not in varies for a, n in enumerate(mesh.shape))
    stays = is_flat and not (plan.redistributes or plan.any_varying)
    is_first = bool(args) and bool(tensors) and args[0] is tensors[0]
    of_first = is_first and not any(view and view[0] for view in views)
    is_simple_view = stays and is_one and is_first and len(tensors) == 1
    derives: int | None = None
    of_one = is_view and is_one and of_first and not plan.redistributes
    if of_one and (may_vary or not is_simple_view):
        derives = 0
    elif may_vary and stays:
        derives = plan.factors.rematerialize
    sends_shape = is_part and is_dynamic(func, args, kwargs)
    return CallPlan(
        func, mesh, plan.local_fn(), tuple(plan.specs), reads, tuple(kwargs),
        () if inplace else tuple(plan.output_specs),
        input_specs=tuple(plan.input_specs) if plan.redistributes else (),
        is_view=is_view,
        views=views,
        derives=derives,
        writes=tuple(plan.factors.targets) if inplace else None,
        untracked_writes=inplace and is_untracked(func),
        broadcasts_shape=sends_shape,
        native=not (
            plan.redistributes or sends_shape or (inplace and not args)
            or (is_view and ((is_one and not is_simple_view) or not of_first))
            or has_regular or "reduce_first" in options
        ),
        is_simple=(
            is_flat and is_one and not plan.redistributes and derives is None
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
    draws: Any = DRAWS_NOTHING.get(getattr(func, "__name__", "").rstrip("_"))
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
    variant = _variant(tensors)
    numbers = [d for d in (o.dtype for o in outs) if d.is_floating_point or d.is_complex]
    from_tensors = any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)
    by_default = bool(numbers) and not from_tensors  # the default dtype decides
    several: Any = template if type(template) in (tuple, list) else [template]
    values = (*args, *kwargs.values())
    native = (
        not (writes or draws or by_default or "reduce_first" in options)
        and variant == ((*variant[0][:1], None, None), *[None] * len(tensors)) and bool(outs)
        and all(type(o) is TensorResult and o.same is None for o in several)
        and all(o.strides is None or o.viewed is not None for o in outs)
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
    plan.variants[variant] = plan
    return plan


def variant_of(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> CallPlan:
    """Returns the plan of a call off the mesh for the present settings of torch and the strides of
    the ``tensors`` among the arguments."""
    variant = _variant(tensors)
    found = plan.variants.get(variant)
    if found is None:
        layouts, writes = tuple([s.layout for s in plan.results]), plan.writes is not None
        found = plan_off_mesh(plan.func, plan.mesh, layouts, args, kwargs, writes)
        plan.variants[variant] = found
    return found


def _variant(tensors: Sequence[Any]) -> Any:
    states = [t._view_state if type(t) is DistTensor else None for t in tensors]
    return surroundings(), *[None if s is None else s.strides for s in states]


def _by_key(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if all calls of this key have the same arguments, but for the data of
    DistTensors: a key contains only the type of a float, and no data of a regular tensor."""
    values = (*args, *kwargs.values())
    return all(type(v) in (DistTensor, int, bool, str, type(None)) for v in values)
