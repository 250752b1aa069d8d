"""Plans a call whose rule is known: ``CallByRule`` -> ``CallPlan``, on the mesh or off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.comm.process_group import world
from disttensor.core.layout import Axes, Layout, replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import CONSTANT, CallPlan, Read, ReadKind
from disttensor.dispatch.mesh_collectives import MeshCollectives
from disttensor.dispatch.resolve import CallByRule
from disttensor.dispatch.writes import first_of, is_untracked
from disttensor.off_mesh import execute
from disttensor.pytree import collect
from disttensor.random.draws import DRAWS_NOTHING
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import is_local_relabel
from ops.answer import TensorResult, is_dynamic, surroundings
from ops.local import LocalCall

Tensor = torch.Tensor
Function = Callable[..., Any]


def plan_call(call: CallByRule) -> CallPlan:
    """Returns the CallPlan of calls like this one."""
    func, (args, kwargs, order), tensors, specs, rule, factors, decision, _ = call
    mesh, inplace, is_view = specs[0].mesh, rule.inplace, factors.view
    wanted, results = wanted_specs(call), result_specs(call)
    varying = [_several(mesh, axes) for axes in decision.varying_axes]
    moved = [
        w is not None and not is_local_relabel(s, w) for s, w in zip(specs, wanted, strict=True)
    ]
    redistributes = any(w is not None for w in wanted)
    options: dict[str, Any] = {"order": order, "side_writes": tuple(factors.side_writes)}
    if not (inplace or is_view) and any(s.layout.partial for s in specs):
        options["may_reuse"] = tuple([bool(s.layout.partial) for s in specs])
        reduced = tuple([_only_reduced(*ends) for ends in zip(specs, wanted, moved, strict=True)])
        if any(reduced):
            options["reduce_first"] = reduced
    if mesh.coordinate is None:
        layouts = None if inplace else tuple(decision.output_layouts)
        return plan_off_mesh(func, mesh, layouts, args, kwargs, inplace, **options)
    reads = _reads(call, wanted, varying)
    is_flat = all(r.kind <= ReadKind.TENSOR for r in reads)
    is_part = len(mesh.root.ranks) < world()[1]
    # a write to a regular tensor, which ranks off the mesh may be sent (``values_everywhere``)
    target = first_of(args, kwargs) if inplace else [tensors[i] for i in factors.side_writes]
    written = collect(target, []) if is_part else []
    has_regular = any(r.regular for r in reads) or any(type(x) is not DistTensor for x in written)
    views = tuple([None if i is None else (i, moved[i]) for i in factors.views])
    is_one = len(results) == 1
    varies = results[0].varies if results else frozenset()
    may_vary = any(n > 1 and a not in varies for a, n in enumerate(mesh.shape))
    stays = is_flat and not redistributes and not any(varying)
    is_first = bool(args) and bool(tensors) and args[0] is tensors[0]
    of_first = is_first and not any(view and view[0] for view in views)
    is_simple_view = stays and is_one and is_first and len(tensors) == 1
    derives: int | None = None
    of_one = is_view and is_one and of_first and not redistributes
    if of_one and (may_vary or not is_simple_view):
        derives = 0
    elif may_vary and stays:
        derives = factors.rematerialize
    sends_shape = is_part and is_dynamic(func, args, kwargs)
    return CallPlan(
        func, mesh, local_function(call, wanted, results), tuple(specs), reads, tuple(kwargs),
        () if inplace else results,
        input_specs=wanted if redistributes else (),
        is_view=is_view,
        views=views,
        derives=derives,
        writes=tuple(factors.targets) if inplace else None,
        untracked_writes=inplace and is_untracked(func),
        broadcasts_shape=sends_shape,
        native=not (
            redistributes or sends_shape or (inplace and not args)
            or (is_view and ((is_one and not is_simple_view) or not of_first))
            or has_regular or "reduce_first" in options
        ),
        is_simple=(
            is_flat and is_one and not redistributes and derives is None
            and not (inplace or is_view or sends_shape or has_regular or "may_reuse" in options)
            and not factors.side_writes
        ),
        is_checked=inplace,
        **options,
    )  # fmt: skip


def wanted_specs(call: CallByRule) -> tuple[DistSpec | None, ...]:
    """Returns for each tensor the spec to which it is resharded, or None."""
    layouts = call.decision.input_layouts
    pairs = zip(call.specs, layouts, strict=True)
    return tuple([None if s.layout == want else s.with_layout(want) for s, want in pairs])


def result_specs(call: CallByRule) -> tuple[DistSpec, ...]:
    """Returns the specs of the results; the first run shows their dtypes."""
    mesh, dtype = call.specs[0].mesh, call.specs[0].dtype
    pairs = zip(call.decision.output_layouts, call.shapes, strict=True)
    return tuple([DistSpec(mesh, layout, shape, dtype) for layout, shape in pairs])


def local_function(
    call: CallByRule, wanted: Sequence[DistSpec | None], results: Sequence[DistSpec]
) -> Function:
    """Returns the function that runs on the locals: the function itself, or the rule's own."""
    if call.factors.local is None:
        return call.func
    mesh = call.specs[0].mesh
    needed = [w or s for s, w in zip(call.specs, wanted, strict=True)]
    split = {letter: _several(mesh, axes) for letter, axes in call.decision.split.items()}
    return call.factors.local(
        LocalCall(
            call.func, needed, list(results), {k: v for k, v in split.items() if v}, mesh.shape,
            mesh.coordinate or (0,) * mesh.ndim, MeshCollectives(mesh),
        )
    )  # fmt: skip


def _several(mesh: ProcessMesh, axes: Axes) -> Axes:
    """Returns the axes of more than one rank."""
    return tuple([a for a in axes if mesh.shape[a] > 1])


def _only_reduced(s: DistSpec, want: DistSpec | None, moved: bool) -> DistSpec | None:
    """Returns the spec to which a call reduces a pending sum, if it does nothing else to it."""
    whole = Layout(s.layout.dims)
    sums = bool(s.layout.partial) and all(op == "sum" for _, op in s.layout.partial)
    return want if moved and sums and want is not None and want.layout == whole else None


def _reads(
    call: CallByRule, wanted: Sequence[DistSpec | None], varying: Sequence[Axes]
) -> tuple[Read, ...]:
    """Returns a Read for each argument: how the local function receives it."""
    args, kwargs, _ = call.form
    each = iter(zip(wanted, varying, call.specs, strict=True))

    def read(t: Tensor) -> Read:
        spec, axes, own = next(each)
        if type(t) is DistTensor:
            return Read(ReadKind.TENSOR, spec, axes)
        return Read(ReadKind.TENSOR, spec, axes, own) if spec or axes else CONSTANT

    reads = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            reads.append(read(value))
            continue
        found = [read(t) for t in collect(value, [])]
        if not found:
            reads.append(CONSTANT)
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
        options: ``order``, ``side_writes``, ``may_reuse`` and ``reduce_first`` of the plan.
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
        and not options.get("side_writes")
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
        found = plan_off_mesh(
            plan.func, plan.mesh, layouts, args, kwargs, writes, side_writes=plan.side_writes
        )
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
