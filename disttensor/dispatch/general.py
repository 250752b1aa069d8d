"""The runner of any call: reshards, in-place targets, lists, several results, views, plain tensors
among the arguments. It checks what the rule says of the first result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.dispatch import strict
from disttensor.dispatch.direct import replay
from disttensor.dispatch.outputs import check_outputs, wrap_outputs
from disttensor.dispatch.resolve import Plan
from disttensor.dispatch.writes import targets, written
from disttensor.pytree import collect, substitute
from disttensor.recipe import NESTED, Recipe, Runner, Use, outputs_of
from disttensor.tensor import views
from disttensor.tensor.base import set_origin
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import is_gradient, owner_of
from disttensor.tensor.grad_sync import sync_gradients
from disttensor.tensor.reshard import moved_for, relabels

Tensor = torch.Tensor
Function = Callable[..., Any]

_setitem: Callable[..., Any] = Tensor.__setitem__
_grad: Callable[[], bool] = torch.is_grad_enabled


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
        if reduces and not strict.strict.current() and reduce_pending(args, kwargs, reduced):
            return func(*args, **kwargs)
        if redistributes and strict.strict.current():
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
            for r in collect(result, []):
                views.enter(r, x, func, back)
        elif x._view_state is not None:
            for r in collect(result, []):
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
        if isinstance(a, (list, tuple)) and collect(a, []):
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
        isinstance(a, (list, tuple, dict)) or (type(a) is DistTensor and is_gradient(a))
        for a in args
    ):
        return False
    tensors = collect((args, kwargs), [])
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
    if not isinstance(a, (list, tuple, dict)):
        return a
    if type(a) is list or type(a) is tuple:  # mostly, of DistTensors alone
        if not a or type(a[0]) is float:
            return a
        try:
            found = [t.local for t in a]
            return found if type(a) is list else tuple(found)  # x[i, j] is not x[[i, j]]
        except AttributeError:
            pass
    return substitute(a, lambda t: t.local if type(t) is DistTensor else t)
