"""How a plan is carried out, call after call: read the inputs, run the local function, wrap.

The first call of a kind goes through ``general``, which checks what the rule says of the result.
After it ``direct`` takes over where it can: every tensor is a DistTensor that stays as it lies and
one tensor comes out. On ranks outside the mesh ``disttensor.meta.execute`` joins tokens instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from disttensor import errors
from disttensor.autograd.grad_types import Typed, move
from disttensor.comm import objects
from disttensor.comm.process_group import world
from disttensor.dispatch import strict
from disttensor.dispatch.reduction_cache import reusing
from disttensor.dispatch.resolve import Plan
from disttensor.layout import Axes
from disttensor.meta import execute as meta
from disttensor.meta import infer
from disttensor.recipe import NESTED, Recipe, Use, outputs_of, recipe_of, with_recipe
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.base import from_origin, origin_of, set_origin
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import is_gradient, owner_of
from disttensor.tensor.grad_sync import sync_gradients
from disttensor.tensor.reshard import moved_for, relabels
from disttensor.tensor.tensor_meta import described
from disttensor.tensor.versions import INFERENCE, UNCOUNTED, count
from disttensor.torch_private import make_subclass, schemas_of
from disttensor.tree import flat, substitute

Tensor = torch.Tensor
Function = Callable[..., Any]
Runner = Callable[[Sequence[Any], Any], Any]

_setitem: Callable[..., Any] = Tensor.__setitem__
_grad: Callable[[], bool] = torch.is_grad_enabled


def runner_of(
    plan: Plan,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keep: Callable[[Runner], Any] | None,
) -> Runner:
    """The runner of calls like this one. ``keep`` is given a faster one, if there is one, after the
    first call."""
    func, mesh = plan.func, plan.mesh
    inplace, view = plan.rule.inplace, plan.factors.view
    if mesh.coordinate is None:
        layouts = None if inplace else plan.decision.output_layouts
        return reusing(plan, meta.runner_of(func, mesh, layouts, args, kwargs, inplace))
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    nested = len(tensors) < len(plan.specs)
    several = view and (len(tensors) != 1 or tensors[0] is not args[0] or plan.any_varying)
    plain = any(type(t) is not DistTensor for t in tensors)
    simple = not (
        several
        or plan.redistributes
        or nested
        or plain
        or len(plan.output_specs) != 1
        or (inplace and not args)
    )
    varies = plan.output_specs[0].varies if plan.output_specs else frozenset()
    free = any(n > 1 and a not in varies for a, n in enumerate(mesh.shape))
    repeats = plan.factors.rematerialize and free
    repeats = repeats and not (nested or plan.redistributes or plan.any_varying)
    tells = infer.dynamic(func, args, kwargs) and mesh.size < world()[1]
    bare = local_fn = plan.local_fn()
    if inplace and uncounted(func):
        local_fn = counting(plan, bare)

    def complete(run: Runner) -> Runner:
        recipe = recipe_of(run)
        if recipe is not None and local_fn is not bare:
            run = with_recipe(run, recipe._replace(local_fn=bare, uncounted=True))
        if repeats:
            run = rematerializing(local_fn, run)
        return reusing(plan, telling(mesh, run) if tells else run)

    if simple and inplace and not view:  # no result to be checked
        return complete(direct(plan, local_fn, args, kwargs, free))
    call = general(plan, local_fn, None if nested else (args, kwargs))

    def first(args: Sequence[Any], kwargs: Any) -> Any:
        out = call(args, kwargs)
        one = type(out) is DistTensor  # not a tuple, as of a split into one piece
        new = one and not any(out is a for a in args)
        if simple and (new or (view and one)):
            run = direct(plan, local_fn, args, kwargs or {}, free)
        else:
            run = with_recipe(call, general_recipe(plan, local_fn, args, kwargs or {}))
        if keep is not None:
            keep(complete(run))
        return out

    return complete(first)


def answering(answer: Any) -> Runner:
    """The runner of a question that the key of a call answers."""
    return with_recipe(lambda args, kwargs: answer, Recipe(None, (), (), (), answer=answer))


# One tensor from DistTensors that stay as they lie ------------------------------------------------


def direct(
    plan: Plan, local_fn: Function, args: Sequence[Any], kwargs: dict[str, Any], free: bool
) -> Runner:
    """``free``: there are axes over which the result does not vary, though its uses may."""
    spec = plan.output_specs[0]
    dtype, meta_tensor = spec.dtype, spec.meta_tensor
    axes_of = iter(plan.varying_axes)
    # of each argument: None where it is no tensor, else the axes over which its use varies
    uses = [next(axes_of) if isinstance(a, Tensor) else None for a in args]
    named = [next(axes_of) if isinstance(v, Tensor) else None for v in kwargs.values()]
    constants = not any(u is not None for u in named)
    view = plan.factors.view
    targets = (0,) if plan.rule.inplace and not view else None
    recipe = Recipe(
        local_fn, (*uses, *named), tuple(kwargs), outputs_of([spec]), view, view, targets
    )
    if view:
        return viewing(plan, local_fn, free, recipe)

    if plan.rule.inplace:

        def run(args: Sequence[Any], kwargs: Any) -> Any:
            x = args[0]
            if x._view_state is not None:
                views.refuse_copy(x, plan.func)
            locals_: list[Any] = [
                a if u is None else a.local_for(u) if u else a.local
                for a, u in zip(args, uses)  # noqa: B905
            ]
            if kwargs:
                out = local_fn(*locals_, **(kwargs if constants else _named(kwargs, named)))
            else:
                out = local_fn(*locals_)
            written(x)
            return None if out is None else x

    elif constants and uses == [(), ()] and not kwargs:

        def run(args: Sequence[Any], kwargs: Any) -> Any:
            out = local_fn(args[0].local, args[1].local)
            if out.dtype is not dtype:
                return wrap_outputs(out, (spec,))
            new = make_subclass(DistTensor, meta_tensor)
            new.local = out
            new.spec = spec
            return new

    elif constants and uses == [()] and not kwargs:

        def run(args: Sequence[Any], kwargs: Any) -> Any:
            out = local_fn(args[0].local)
            if out.dtype is not dtype:
                return wrap_outputs(out, (spec,))
            new = make_subclass(DistTensor, meta_tensor)
            new.local = out
            new.spec = spec
            return new

    elif constants and uses[:1] == [()] and not any(u is not None for u in uses[1:]):

        def run(args: Sequence[Any], kwargs: Any) -> Any:
            local = args[0].local
            if kwargs:
                out = local_fn(local, *args[1:], **kwargs)
            else:
                out = local_fn(local, *args[1:])
            if out.dtype is not dtype:
                return wrap_outputs(out, (spec,))
            new = make_subclass(DistTensor, meta_tensor)
            new.local = out
            new.spec = spec
            return new

    else:

        def run(args: Sequence[Any], kwargs: Any) -> Any:
            # spelled out: a call for each argument costs in the warm path
            locals_: list[Any] = [
                a if u is None else a.local_for(u) if u else a.local
                for a, u in zip(args, uses)  # noqa: B905
            ]
            if kwargs:
                out = local_fn(*locals_, **(kwargs if constants else _named(kwargs, named)))
            else:
                out = local_fn(*locals_)
            if out.dtype is not dtype:
                return wrap_outputs(out, (spec,))
            new = make_subclass(DistTensor, meta_tensor)
            new.local = out
            new.spec = spec
            return new

    return with_recipe(run, recipe)


def viewing(plan: Plan, local_fn: Function, free: bool, recipe: Recipe) -> Runner:
    """A view of the first argument, the one tensor of the call; it may be that argument itself, as
    of ``x.contiguous()``."""
    spec = plan.output_specs[0]
    meta_tensor = spec.meta_tensor

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        x = args[0]
        local = x.local
        out = local_fn(local, *args[1:], **kwargs) if kwargs else local_fn(local, *args[1:])
        if out is local:
            return x
        new = make_subclass(DistTensor, meta_tensor)
        new.local = out
        new.spec = spec
        if x._view_state is not None:
            views.inherit(new, x)
        if free and out.requires_grad and _grad():
            after(args, kwargs, new)
        return new

    def after(args: Sequence[Any], kwargs: Any, new: Any) -> None:
        origin = partial(replay, local_fn, args[0], args[1:], kwargs or {})
        new._grad_state = from_origin(origin)

    return with_recipe(run, recipe._replace(after=after) if free else recipe)


def replay(
    local_fn: Function, x: DistTensor, rest: Sequence[Any], kwargs: Any, axes: Axes
) -> Tensor:
    """The origin of a view: a varying use of the view is the view of a varying use."""
    out: Tensor = local_fn(x.local_for(axes), *rest, **kwargs)
    return out


def _named(kwargs: dict[str, Any], named: Sequence[Axes | None]) -> dict[str, Any]:
    return {
        k: v if u is None else v.local_for(u) if u else v.local
        for (k, v), u in zip(kwargs.items(), named, strict=True)
    }


# Any call -----------------------------------------------------------------------------------------


def general(plan: Plan, local_fn: Function, shallow: Any) -> Runner:
    """Reshards, in-place targets, lists, several results, views, plain tensors among the arguments.

    ``shallow``: args and kwargs of a call in which no tensor is inside a list.
    """
    func, specs, input_specs, varying_axes = (
        plan.func, plan.specs, plan.input_specs, plan.varying_axes,
    )  # fmt: skip
    numbers = itertools.count()
    slotted = bool(shallow)  # the runner stays, and must not hold the tensors of the first call
    slots, named = [
        [next(numbers) if isinstance(a, Tensor) else -1 for a in part]
        for part in ((shallow[0], shallow[1].values()) if shallow else ())
    ] or ([], [])
    inplace, view, redistributes = plan.rule.inplace, plan.factors.view, plan.redistributes
    untouched = not redistributes and not plan.any_varying
    moved, reduced = False, [False] * len(specs)
    for i, (s, w) in enumerate(zip(specs, input_specs, strict=True)):
        if w is not None:
            moved = moved or not relabels(s, w)
            reduced[i] = bool(s.layout.partial and not w.layout.partial)
    reduces = any(reduced)
    checked = False

    def at(t: Tensor, i: int) -> Tensor:
        return local_as(t, input_specs[i], varying_axes[i], specs[i])

    def read(args: Sequence[Any], kwargs: Any) -> Any:
        if untouched:
            return [_local_of(a) for a in args], {k: _local_of(v) for k, v in kwargs.items()}
        if slotted:
            return [a if i < 0 else at(a, i) for a, i in zip(args, slots, strict=True)], {
                k: v if i < 0 else at(v, i) for (k, v), i in zip(kwargs.items(), named, strict=True)
            }
        count = itertools.count()
        return substitute((list(args), kwargs), lambda t: at(t, next(count)))

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        nonlocal checked
        kwargs = kwargs or {}
        if reduces and not strict.depth() and reduce_pending(args, kwargs, reduced):
            return func(*args, **kwargs)
        if redistributes and strict.depth():
            strict.check_moves(func, specs, input_specs)
        aims = targets(plan, args, kwargs) if inplace else []
        for t in aims:
            views.refuse_copy(t, func)
        local_args, local_kwargs = read(args, kwargs)
        out = local_fn(*local_args, **local_kwargs)
        if inplace:
            for t in aims:
                written(t)
            return None if out is None else args[0] if args else aims[0]
        x: Any = args[0] if args and type(args[0]) is DistTensor else None
        if x is not None and out is x.local:
            return x
        if not checked:
            check_outputs(plan, out)
            checked = True
        result = wrap_outputs(out, plan.output_specs)
        if not view or x is None:
            return result
        one = type(result) is DistTensor
        if one and not redistributes and x.local.requires_grad and _grad():
            rest = tuple(local_args[1:])
            set_origin(result, partial(replay, local_fn, x, rest, local_kwargs))
        if moved:
            back = partial(_setitem, x, args[1]) if func is Tensor.__getitem__ else None
            for r in flat(result, []):
                views.enter(r, x, errors.name_of(func), back)
        elif x._view_state is not None:
            for r in flat(result, []):
                views.inherit(r, x)
        return result

    return run


def general_recipe(
    plan: Plan, local_fn: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> Recipe | None:
    """What ``general`` does in calls like this one, where nothing is moved."""
    view, inplace = plan.factors.view, plan.rule.inplace
    if plan.redistributes or (view and len(plan.output_specs) == 1) or (inplace and not args):
        return None
    uses: list[Use] = []
    axes_of = iter(plan.varying_axes)
    for a in (*args, *kwargs.values()):
        if isinstance(a, (list, tuple)) and flat(a, []):
            uses.append(NESTED)
        elif isinstance(a, Tensor):
            axes = next(axes_of, ())
            if axes and type(a) is not DistTensor:
                return None
            uses.append(axes if type(a) is DistTensor else None)
        else:
            uses.append(None)
    outputs = () if inplace else outputs_of(plan.output_specs)
    targets = plan.factors.targets if inplace else None
    return Recipe(
        local_fn, tuple(uses), tuple(kwargs), outputs, not inplace, view,
        None if targets is None else tuple(targets), no_graph=NESTED in uses and plan.any_varying,
    )  # fmt: skip


def reduce_pending(args: Sequence[Any], kwargs: Any, reduced: Sequence[bool]) -> bool:
    """Where pending gradients of parameters are needed whole, reduce them for good, as an optimizer
    step would. Was there one?"""
    if not kwargs and not any(
        type(a) is list or type(a) is tuple or (type(a) is DistTensor and is_gradient(a))
        for a in args
    ):
        return False
    tensors = flat((args, kwargs), [])
    owners = [
        owner_of(t)
        for t, now in zip(tensors, reduced, strict=True)
        if now and type(t) is DistTensor
    ]
    found = [p for p in owners if p is not None]
    if found:
        sync_gradients(found)
    return bool(found)


def local_as(t: Tensor, needed: DistSpec | None, axes: Axes, spec: DistSpec) -> Tensor:
    """The local of an argument in the layout and for the use that the plan says."""
    if type(t) is not DistTensor:
        if needed is None and not axes:
            return t
        # Not t itself: the alias of a leaf would collect a gradient that never reaches t.
        t = wrap(t.view_as(t) if t.requires_grad and _grad() else t, spec)
    if needed is None:
        return t.local_for(axes) if axes else t.local
    return moved_for(t, needed, axes)


def _local_of(a: Any) -> Any:
    if type(a) is DistTensor:
        return a.local
    if (type(a) is list or type(a) is tuple) and a and type(a[0]) is not float:
        try:
            found = [t.local for t in a]
            return found if type(a) is list else tuple(found)  # x[i, j] is not x[[i, j]]
        except AttributeError:
            return type(a)([_local_of(v) for v in a])
    return a


def check_outputs(plan: Plan, out: Any) -> None:
    """Check the rule's local shapes against the first result, and note its dtypes."""
    for i, (t, spec) in enumerate(zip(flat(out, []), plan.output_specs, strict=False)):
        if tuple(t.shape) != tuple(spec.local_shape):
            raise RuntimeError(
                f"the rule {plan.rule.name} says that this rank's piece of {spec!r} is "
                f"{list(spec.local_shape)}, but the local function gave {list(t.shape)}: the rule "
                "is wrong"
            )
        plan.output_specs[i] = spec.with_dtype(t.dtype)


def wrap_outputs(out: Any, specs: Sequence[DistSpec]) -> Any:
    """Local results as DistTensors, in the structure they came in."""
    if type(out) is Tensor:
        spec = specs[0]
        return wrap(out, spec if out.dtype is spec.dtype else spec.with_dtype(out.dtype))
    if (
        (type(out) is tuple or type(out) is list)
        and len(out) == len(specs)
        and all(type(t) is Tensor for t in out)
    ):
        return type(out)(
            [
                wrap(t, s if t.dtype is s.dtype else s.with_dtype(t.dtype))
                for t, s in zip(out, specs, strict=True)
            ]
        )
    numbers = itertools.count()
    return substitute(out, lambda t: wrap(t, specs[next(numbers)].with_dtype(t.dtype)))


# Writes -------------------------------------------------------------------------------------------


def targets(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DistTensor]:
    """What an in-place call writes to, less plain tensors that take DistTensors in."""
    tensors: list[Any] = flat((args, kwargs), [])
    return [tensors[i] for i in plan.factors.targets if type(tensors[i]) is DistTensor]


@lru_cache(maxsize=1024)
def uncounted(func: Function) -> bool:
    """May autograd not count what ``func`` writes? That is so of torch's fused kernels, and may be
    of any operator or function that is not torch's own."""
    ours = (getattr(func, "__module__", None) or "torch").startswith("torch")
    fused = getattr(func, "__name__", "").startswith(("_fused_", "_amp_"))
    return fused or bool(schemas_of(func)) or not ours


def counting(plan: Plan, local_fn: Function) -> Function:
    """``local_fn``, of an in-place call whose writes autograd does not count."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = local_fn(*args, **kwargs)
        locals_ = flat((args, kwargs), [])
        count(*[locals_[i] for i in plan.factors.targets])
        return out

    return run


def written(x: DistTensor) -> None:
    """The local of ``x`` has been written to: its uses before this are of the old value."""
    if x._grad_state is not None or x._reduced is not None or views.LIVE or INFERENCE:
        x.forget_uses()
    if x._view_state is not None:
        views.write_back(x)


# What some calls do besides -----------------------------------------------------------------------


def rematerializing(local_fn: Function, run: Runner) -> Runner:
    """``run``, whose result is computed once more for each set of axes over which uses of it vary;
    unless somebody has written to it, or to what it was made of, by then."""

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        out = run(args, kwargs)
        if out.local.requires_grad and _grad():
            after(args, kwargs, out)
        return out

    def after(args: Sequence[Any], kwargs: Any, out: Any) -> None:
        if origin_of(out) is not None:
            return
        words = kwargs or {}
        made = versions_of([t for t in (*args, *words.values()) if isinstance(t, Tensor)])
        value = out.local
        parts = local_fn, tuple(args), words, made, value, writes_to(value), out.spec
        set_origin(out, partial(once_more, *parts))

    recipe = recipe_of(run)
    single = recipe is not None and len(recipe.outputs) == 1 and recipe.after is None
    return with_recipe(call, recipe._replace(after=after) if recipe and single else None)


def once_more(
    local_fn: Function, args: Sequence[Any], words: dict[str, Any], made: list[int],
    value: Tensor, made_at: int, spec: DistSpec, axes: Axes,
) -> Tensor:  # fmt: skip
    """The origin of a cheap result: the call again, of uses that vary. ``made``, ``made_at``: the
    versions of its arguments and of its ``value`` when it was made."""
    now = versions_of([t for t in (*args, *words.values()) if isinstance(t, Tensor)])
    if writes_to(value) != made_at or now != made:
        out: Tensor = move(value, Typed(spec), Typed(spec, axes), None)
        return out
    varying = [_varying(a, axes) for a in args]
    again: Tensor = local_fn(*varying, **{k: _varying(v, axes) for k, v in words.items()})
    return again


def _varying(a: Any, axes: Axes) -> Any:
    return a.local_for(axes) if type(a) is DistTensor else a


def writes_to(value: Tensor) -> int:
    return value._version + UNCOUNTED[0]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [(t.local if type(t) is DistTensor else t)._version for t in tensors]


def telling(mesh: Any, run: Runner) -> Runner:
    """``run``, whose results have shapes that depend on data: ranks outside the mesh are told."""

    def told(args: Sequence[Any], kwargs: Any) -> Any:
        result = run(args, kwargs)
        objects.send_object(described(result), mesh.ranks, mesh.device)
        return result

    return told
