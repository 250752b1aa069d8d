"""The path of one call, from the user's function to the local one and back.

Warm: a key, one look-up, and the runner that was chosen when the plan was made. Cold: ``prepare``
asks, in this order, for a handler (functions that are no computation), a rule, the Python body of
the function, and last the fallback that gathers everything: always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor import errors
from disttensor.cache import Cache
from disttensor.dispatch import fallback, foreach
from disttensor.dispatch.execute import runner_of
from disttensor.dispatch.plan import Uncacheable, key_of, layouts_of, make_plan, plain_spec
from disttensor.dispatch.reduction_cache import shared
from disttensor.meta import execute
from disttensor.tensor.dist_tensor import DistTensor, carry_out_with
from disttensor.tree import flat, substitute
from ops.factors import Arg
from ops.infer import NoRule
from ops.registry import RULES

Tensor = torch.Tensor
Function = Callable[..., Any]
Runner = Callable[[Sequence[Any], Any], Any]

HANDLERS: dict[Function, Function] = {}  # functions that are answered as they are: no rule, no key
PLANS: Cache[Any, Runner] = Cache(16384)


def dispatch(
    cls: type, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """``DistTensor.__torch_function__``. One and two arguments are spelled out: they are most
    calls."""
    try:
        n = len(args)
        if n == 2:
            a, b = args
            key: Any = (
                func,
                a.spec if type(a) is DistTensor else key_of(a),
                b.spec if type(b) is DistTensor else key_of(b),
            )
        elif n == 1:
            a = args[0]
            key = (func, a.spec if type(a) is DistTensor else key_of(a))
        else:
            key = (
                func,
                *[
                    a.spec if type(a) is DistTensor else a if type(a) is int else key_of(a)
                    for a in args
                ],
            )
        if kwargs:
            key = (
                key,
                *kwargs,
                *[v.spec if type(v) is DistTensor else key_of(v) for v in kwargs.values()],
            )
    except Uncacheable:
        return prepare(func, args, kwargs or {})(args, kwargs or {})
    run = PLANS.get(key)
    if run is None:
        run = PLANS[key] = prepare(func, args, kwargs or {})
    return run(args, kwargs)


def handler(*funcs: Function) -> Callable[[Function], Function]:
    """Register what answers these functions when a DistTensor is among their arguments."""

    def enter(answer: Function) -> Function:
        for func in funcs:
            HANDLERS[func] = answer
        return answer

    return enter


def prepare(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Runner:
    """The runner for calls like this one."""
    if func in HANDLERS:
        answer = HANDLERS[func]
        return lambda args, kwargs: answer(*args, **(kwargs or {}))
    if kwargs.get("out") is not None:
        return lambda args, kwargs: fallback.into_out(func, args, kwargs)
    if "out" in kwargs:
        bare = prepare(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        return lambda args, kwargs: bare(args, {k: v for k, v in kwargs.items() if k != "out"})
    rule = RULES.get(func)
    if rule is None:
        return fallback.through(func, "no rule")
    if foreach.meshes_of(func, args) > 1:
        return foreach.each_mesh(func)
    if rule.floats and any(type(a) is float for a in (*args, *kwargs.values())):
        return _by_value(func)
    return _planned(func, args, kwargs)


def _by_value(func: Function) -> Runner:
    """For functions whose rule depends on the value of a float: plans by value, below the plan by
    type."""
    plans: Cache[Any, Runner] = Cache(256)

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        kwargs = kwargs or {}
        key = tuple([key_of(a, floats=True) for a in (*args, *kwargs.items())])
        if key not in plans:
            plans[key] = _planned(func, args, kwargs)
        return plans[key](args, kwargs)

    return run


def _planned(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Runner:
    tensors = flat((args, kwargs), [])
    mesh = one_mesh(func, tensors)
    specs = [t.spec if type(t) is DistTensor else plain_spec(t, mesh) for t in tensors]
    if any(s.layout.own for s in specs):
        return fallback.gathered(
            func, "rules know Shard, Replicate and Partial; a placement of another type is gathered"
        )
    numbers = iter(range(len(tensors)))

    def arg(t: Tensor) -> Arg:
        i = next(numbers)
        return Arg(
            specs[i].shape,
            dtype=specs[i].dtype,
            layout=specs[i].layout,
            index=i,
            requires_grad=t.requires_grad,
        )

    asked = substitute(args, arg), substitute(kwargs, arg)
    try:
        if mesh.coordinate is None:
            layouts = layouts_of(func, *asked, mesh)
            away = execute.runner_of(func, mesh, layouts, args, kwargs, layouts is None)
            return away if layouts is None else shared(away, func, specs, asked, mesh)
        plan = make_plan(func, *asked, specs, mesh)
    except NoRule as reason:
        return fallback.through(func, str(reason))
    if plan is None:
        return fallback.gathered(func, "in place", quiet=True)
    here = runner_of(func, plan, args, kwargs, specs)
    run = execute.telling(here, func, mesh, args, kwargs)
    return run if plan.inplace else shared(run, func, specs, asked, mesh)


def one_mesh(func: Function, tensors: Sequence[Tensor]) -> Any:
    """The mesh of the call. Raises ValueError where there are two: it is never guessed."""
    dist = [t for t in tensors if type(t) is DistTensor]
    mesh = dist[0].spec.mesh
    if any(
        type(t).__name__ == "DTensor" for t in tensors
    ):  # by name: importing it costs more than all of ours
        raise ValueError(
            f"{errors.name_of(func)}: a torch DTensor among DistTensors: convert it with "
            "from_dtensor(x), which copies nothing"
        )
    for t in dist[1:]:
        if t.spec.mesh is not mesh:
            raise ValueError(
                f"{errors.name_of(func)}: tensors on two meshes: {dist[0].spec!r} on {mesh!r} and "
                f"{t.spec!r} on {t.spec.mesh!r}. Bring one over first: reshard(x, mesh, placements)"
            )
    return mesh


carry_out_with(dispatch)
