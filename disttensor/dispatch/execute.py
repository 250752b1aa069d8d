"""How a plan is carried out, call after call: the runner that reads the inputs, runs the local
function and wraps what it gave.

The first call of a kind goes through ``general``, which checks what the rule says of the result.
After it ``direct`` takes over where it can. On ranks outside the mesh ``disttensor.meta.execute``
joins tokens instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.comm import objects
from disttensor.comm.process_group import world
from disttensor.dispatch.direct import direct
from disttensor.dispatch.general import general, general_recipe
from disttensor.dispatch.reduction_cache import reusing
from disttensor.dispatch.rematerialize import rematerializing
from disttensor.dispatch.resolve import Plan
from disttensor.dispatch.writes import counting, uncounted
from disttensor.meta import execute as meta
from disttensor.meta import infer
from disttensor.recipe import Recipe, Runner, recipe_of, with_recipe
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.tensor_meta import described

Tensor = torch.Tensor


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
    tells = infer.dynamic(func, args, kwargs) and mesh.root.size < world()[1]
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


def telling(mesh: Any, run: Runner) -> Runner:
    """``run``, whose results have shapes that depend on data: ranks outside the mesh are told."""

    def told(args: Sequence[Any], kwargs: Any) -> Any:
        result = run(args, kwargs)
        objects.send_object(described(result), mesh.root.ranks, mesh.device)
        return result

    return told
