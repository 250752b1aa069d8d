"""run: executes a CallPlan. ``native.c`` does the same in C for common calls.

On the mesh: reads the locals, calls the local function, wraps its results. Off the mesh: only
metadata and tokens, without memory or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from disttensor import observe
from disttensor.comm import objects
from disttensor.dispatch import reduction_cache, strict
from disttensor.dispatch.call_plan import Answer, CallPlan, Planned, Read, ReadKind
from disttensor.dispatch.outputs import wrap_outputs
from disttensor.dispatch.pending_grads import needs_reduction, reduce_pending
from disttensor.dispatch.plan_call import variant_of
from disttensor.dispatch.writes import first_of, mark_written
from disttensor.observe import observers
from disttensor.off_mesh import execute as off_mesh
from disttensor.pytree import collect, substitute
from disttensor.random import draws
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded_local
from disttensor.tensor.tensor_meta import describe_tensors
from disttensor.tensor.uses import set_derivation, with_versions
from disttensor.tensor.versions import count
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
Check = Callable[[CallPlan, Any], CallPlan]  # (plan, results) -> the plan with their dtypes
_CONSTANT, _TENSOR, _LIST, _ = ReadKind

# Views with the same elements in the same order, for all strides of their source
_RESHAPES = ("view", "view_as", "unflatten")
_setitem: Callable[..., Any] = Tensor.__setitem__
_grad: Callable[[], bool] = torch.is_grad_enabled


def run_planned(
    planned: Planned, args: Sequence[Any], kwargs: Any, check: Check | None = None
) -> Any:
    """Runs a planned call. ``check``, for the first call of a plan, compares the results with the
    rule, and returns the plan with their dtypes."""
    if type(planned) is CallPlan:
        return run(planned, args, kwargs or {}, None if planned.is_checked else check)
    if type(planned) is Answer:
        return planned.value
    return planned.run(planned, args, kwargs or {})  # type: ignore[union-attr, arg-type]


def run(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any], check: Check | None = None
) -> Any:
    """Runs a call. ``check``: see ``run_planned``."""
    if kwargs and plan.order is not None:
        args, kwargs = _in_order(plan, args, kwargs)
    if plan.is_simple and not observers:  # the fast path: most calls
        first: Any = args[0] if args else None
        if len(args) == 2 and not kwargs:
            (a, b), (p, q) = args, plan.reads
            out = plan.local(  # type: ignore[misc]
                a if p[0] is _CONSTANT else a.local_for(p[2]) if p[2] else a.local,
                b if q[0] is _CONSTANT else b.local_for(q[2]) if q[2] else b.local,
            )
        else:
            given = [
                a if r[0] is _CONSTANT else a.local_for(r[2]) if r[2] else a.local
                for r, a in zip(plan.reads, args)  # noqa: B905
            ]
            named = _named(plan, kwargs, len(given)) if kwargs else kwargs
            out = plan.local(*given, **named)  # type: ignore[misc]
        if check is not None:
            plan = check(plan, out)
        if type(first) is DistTensor and out is first.local:
            return first
        spec = plan.results[0]
        if type(out) is not Tensor or out.dtype is not spec.dtype:
            return wrap_outputs(out, plan.results)
        new = make_subclass(DistTensor, spec.meta_tensor)
        new.local, new.spec = out, spec
        return new
    if plan.may_reuse:
        reduced = reduction_cache.find(plan, args, kwargs)
        if reduced:
            return reduction_cache.call_with(plan, args, kwargs, reduced)
    if plan.local is None:
        return run_off_mesh(plan, args, kwargs)
    if plan.input_specs:
        if strict.strict.current():
            strict.check_moves(plan.func, plan.specs, plan.input_specs)
        elif reduce_pending(args, kwargs, needs_reduction(plan.specs, plan.input_specs)):
            return plan.func(*args, **kwargs)
    write = plan.writes is not None
    if not plan.broadcasts_shape:
        return _write(plan, args, kwargs) if write else _compute(plan, args, kwargs, check)
    ranks, device = plan.mesh.root.ranks, plan.mesh.device
    with objects.send_errors(ranks, device):
        result = _write(plan, args, kwargs) if write else _compute(plan, args, kwargs, check)
    objects.send_object(describe_tensors(result), ranks, device)
    return result


def _compute(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any], check: Check | None
) -> Any:
    """Runs a call that is not in place."""
    beside = _targets(plan, plan.side_writes, args, kwargs) if plan.side_writes else []
    given, named = _read_all(plan, args, kwargs)
    out = observe.run_local(plan.local, given, named)  # type: ignore[arg-type]
    x: Any = args[0] if args and type(args[0]) is DistTensor else None
    if check is not None:
        plan = check(plan, out)
    if x is not None and out is x.local:
        return x
    result = wrap_outputs(out, plan.results)
    if plan.is_view:
        _relate(plan, args, kwargs, result)
    if plan.derives is not None:
        derive(plan, args, kwargs, result)
    if beside:
        for t in beside:
            if type(t) is DistTensor:
                mark_written(t)
        off_mesh.broadcast_written(beside, plan.mesh)
    return result


def _in_order(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the one form of a call."""
    values, n = (*args, *kwargs.values()), len(plan.reads) - len(plan.keywords)
    given = [values[i] for i in plan.order or ()]
    return given[:n], dict(zip(plan.keywords, given[n:], strict=True))


# Reading --------------------------------------------------------------------------------------


def _read_all(
    plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of the local function."""
    given = [read(r, a) for r, a in zip(plan.reads, args)]  # noqa: B905
    return given, _named(plan, kwargs, len(given)) if kwargs else kwargs


def _named(plan: CallPlan, kwargs: dict[str, Any], n: int) -> dict[str, Any]:
    """Returns the keyword arguments of the local function; ``n``: number of positional ones."""
    rest = zip(plan.keywords, plan.reads[n:], strict=True)
    return {k: read(r, kwargs[k]) for k, r in rest}


def read(r: Read, value: Any) -> Any:
    """Returns one argument of the local function."""
    kind, spec, varying, regular, elements = r
    if kind is _CONSTANT:
        return value
    if kind is _TENSOR:
        x = value if type(value) is DistTensor else as_replicated(value, regular)
        if spec is None:
            return x.local_for(varying) if varying else x.local
        return resharded_local(x, spec, varying)
    if elements and (kind is not _LIST or _grad()):
        each = iter(elements)
        return substitute(value, lambda t: read(next(each), t))
    return locals_of(value)


def as_replicated(x: Tensor, spec: Any) -> DistTensor:
    """Returns x as a DistTensor. If x requires grad, a view of x is wrapped: ``local_for`` makes a
    second leaf of a leaf, whose gradient would not reach x."""
    return wrap(x.view_as(x) if x.requires_grad and _grad() else x, spec)


def locals_of(value: Any) -> Any:
    """Returns a container with the locals of its DistTensors."""
    if type(value) is list or type(value) is tuple:  # usually of DistTensors only
        try:
            found = [t.local for t in value]
            return found if type(value) is list else tuple(found)  # x[i, j] is not x[[i, j]]
        except AttributeError:
            pass
    return substitute(value, lambda t: t.local if type(t) is DistTensor else t)


# Writing --------------------------------------------------------------------------------------


def _write(plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a call in place. Returns its first argument, or None if the local function does."""
    targets = _targets(plan, plan.writes or (), args, kwargs)
    given, named = _read_all(plan, args, kwargs)
    out = observe.run_local(plan.local, given, named)  # type: ignore[arg-type]
    if plan.untracked_writes:
        locals_ = collect((given, named), [])
        count(*[locals_[i] for i in plan.writes or ()])
    for x in targets:
        if type(x) is DistTensor:
            mark_written(x, not plan.untracked_writes)
    off_mesh.broadcast_written(first_of(args, kwargs), plan.mesh)
    return None if out is None else args[0] if args else targets[0]


def _targets(
    plan: CallPlan, numbers: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Returns the tensors with these numbers, which a call writes. One may be a regular tensor."""
    tensors = collect((args, kwargs), [])
    targets = [tensors[i] for i in numbers]
    for x in targets:
        if type(x) is DistTensor:
            views.refuse_copy(x, plan.func)
    return targets


# Views, and results that are recomputed ----------------------------------------------------------


def _relate(plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Relates the results of a view to the arguments whose memory they share."""
    tensors = collect((args, kwargs), [])
    for r, view in zip(collect(result, []), plan.views):  # noqa: B905
        x = tensors[view[0]] if view is not None else None
        if type(x) is not DistTensor:
            continue
        if view is not None and view[1]:
            back: Callable[[Any], Any] | None = None
            if plan.func is Tensor.__getitem__:
                back = partial(_setitem, x, args[1])
            elif plan.func.__name__ in _RESHAPES and r.spec.dtype is x.spec.dtype:
                back = partial(_copy_reshaped, x)
            views.register_copy(r, x, plan.func, back)
        elif x._view_state is not None:
            views.inherit_copy(r, x)


def _copy_reshaped(x: DistTensor, copy: DistTensor) -> None:
    """Copies the elements of a reshaped copy of ``x``, which keep their order, into ``x``."""
    x.copy_(copy.reshape(x.spec.shape))


def derive(plan: CallPlan, args: Sequence[Any], kwargs: Any, result: Any) -> None:
    """Records from which argument ``result`` was made, if varying uses make it from there again. C
    calls it too."""
    # x.split(n) returns a tuple, also of one piece
    if type(result) is not DistTensor or not result.local.requires_grad or not _grad():
        return
    if kwargs and plan.order is not None:
        args, kwargs = _in_order(plan, args, kwargs)
    if not kwargs and plan.derives == 0:
        rest = args[1:]
        for a in rest:
            if isinstance(a, Tensor):
                break
        else:  # most views
            set_derivation(result, result.local, args[0], plan.local, rest)
            return
    kwargs = kwargs or {}
    source = collect((args, kwargs), [])[plan.derives or 0]
    if type(source) is not DistTensor:
        return
    others, named = _read_all(plan, args, kwargs)
    places = [*enumerate(args), *kwargs.items()]
    at: Any = next(i for i, a in places if a is source)
    del (others if type(at) is int else named)[at]
    given = with_versions([*others, *named.values()])
    set_derivation(result, result.local, source, plan.local, others, named, at, given)


# Off the mesh ---------------------------------------------------------------------------------


def run_off_mesh(plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a call on a rank off the mesh."""
    mesh = plan.mesh
    tensors: list[Any] = collect((args, kwargs), [])
    plan = variant_of(plan, args, kwargs, tensors)
    if plan.draws is True or (plan.draws and not plan.draws(*args, **kwargs)):
        draws.draw(mesh, "fast", draws.generator_in(args, kwargs))
    if plan.broadcasts_shape:
        received = objects.recv_object(mesh.root.ranks, mesh.device)
        return off_mesh.wrap_received(received, mesh, args, kwargs)
    off_mesh.refuse_regular(plan.func, mesh, tensors)
    if plan.side_writes:
        off_mesh.mark_written(plan.func, [tensors[i] for i in plan.side_writes], mesh)
    if plan.writes is not None:
        target = first_of(args, kwargs)
        off_mesh.update_written(plan.func, target, tensors, mesh)
        return None if plan.template is None else target
    return off_mesh.fill_results(plan.template, plan.results, tensors, mesh.device)
