"""The runner of most calls: one tensor from DistTensors that stay as they lie.

It reads the locals, runs the local function and wraps. What it would only have to check or to
choose again in each call, the first one has settled (``disttensor.dispatch.execute``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from disttensor.core.layout import Axes
from disttensor.dispatch.outputs import wrap_outputs
from disttensor.dispatch.resolve import Plan
from disttensor.dispatch.writes import written
from disttensor.recipe import Recipe, Runner, outputs_of, with_recipe
from disttensor.tensor import views
from disttensor.tensor.base import from_origin
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
Function = Callable[..., Any]

_grad: Callable[[], bool] = torch.is_grad_enabled


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
