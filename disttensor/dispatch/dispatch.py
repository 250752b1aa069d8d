"""The path of one call, from the user's function to the local one and back.

Warm: a key, one look-up, and ``run`` of the plan that was made for the first call of this key.
Cold: ``start`` plans the call, and keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from disttensor.cache import Cache
from disttensor.comm.lone_failure import note_error
from disttensor.comm.program import Call, note
from disttensor.dispatch import fallback, foreach
from disttensor.dispatch.call_plan import Answer, CallPlan, Planned, PythonCall
from disttensor.dispatch.key import (
    depends_on_floats,
    key_of,
    meshes_in,
    words_of,
)
from disttensor.dispatch.outputs import checked
from disttensor.dispatch.plan_call import plan_call
from disttensor.dispatch.resolve import HANDLERS, OF_KEY, resolve
from disttensor.dispatch.run import carry_out, run
from disttensor.pytree import Uncacheable, collect
from disttensor.tensor.dist_tensor import DistTensor, arrived
from ops.registry import RULES
from ops.signatures import restated

Function = Callable[..., Any]

PLANS: Cache[Any, Planned] = Cache(16384)
_known = PLANS.get


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
        for t in collect((args, kwargs or {}), []):
            if isinstance(t, DistTensor):
                arrived(t)
        return carry_out(plan_of(func, args, kwargs or {}), args, kwargs or {}, checked)
    planned = _known(key)
    if planned is None:
        planned = start(func, args, kwargs, key)
    else:
        note(planned)
    try:
        if type(planned) is CallPlan and planned.is_checked:
            return run(planned, args, kwargs or {})
        return carry_out(planned, args, kwargs, partial(_check, key))
    except BaseException as error:
        note_error(error, planned)
        raise


def start(func: Function, args: Sequence[Any], kwargs: Any, key: Any) -> Planned:
    """Plans the first call of a key, and notes it."""
    planned = _keep(key, plan_of(func, args, kwargs or {}, key), _call(func, key))
    note(planned)
    return planned


def first_call(func: Function, args: Sequence[Any], kwargs: Any) -> tuple[Any, Planned | None]:
    """A call of a kind that the C code does not know: its result, and the plan of the next ones;
    None where nothing was kept, or a result was not seen yet."""
    try:
        key: Any = (func, *[key_of(a) for a in args])
        if kwargs:
            key = (key, *kwargs, *[key_of(v) for v in kwargs.values()])
    except Uncacheable:
        return dispatch(DistTensor, func, (), args, kwargs), None
    result = dispatch(DistTensor, func, (), args, kwargs)
    planned = _known(key)
    if type(planned) is CallPlan and not (planned.is_checked or planned.reduce_first):
        return result, None
    return result, planned


def _keep(key: Any, planned: Planned, call: Call | None) -> Planned:
    """Keeps a plan for calls of this key. ``call``: what other ranks compare."""
    planned = PLANS[key] = replace(planned, call=call)
    return planned


def _check(key: Any, plan: CallPlan, out: Any) -> CallPlan:
    """Keeps the plan with the dtypes of the first results."""
    plan = PLANS[key] = checked(plan, out)
    return plan


def _call(func: Function, key: Any) -> Call:
    """A call of ``func`` as ranks compare it; on no mesh where this rank has nobody to compare
    with."""
    meshes = meshes_in(key)
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is not None and (mesh.size == 1 or mesh.coordinate is None):
        mesh = None
    return Call(lambda: words_of(func, key), mesh, fallback.writes(func))


def plan_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None,
    valued: bool = False,
) -> Planned:  # fmt: skip
    """Plans calls like this one. ``key``: its own, if it has one; ``valued``: the plan may depend
    on the values of floats."""
    rule = RULES.get(func)
    if rule is not None and restated(func, args, kwargs):
        return PythonCall(partial(again, func))
    if rule is not None and not valued:
        floats = rule.floats and depends_on_floats((*args, *kwargs.values()))
        setting = None
        if rule.setting is not None:
            tensors = [t for t in collect((args, kwargs), []) if type(t) is DistTensor]
            setting = rule.setting([t.spec.layout for t in tensors])
        if floats or setting is not None:
            return PythonCall(partial(by_value, func, setting))
    found = resolve(func, args, kwargs, key)
    if found.plan is not None:
        return plan_call(found.plan, args, kwargs)
    if found.way == "handler":
        answer = HANDLERS[func]
        if func in OF_KEY:
            return Answer(answer(*args, **kwargs))
        return PythonCall(lambda args, kwargs: answer(*args, **(kwargs or {})))
    if found.way == "out" and kwargs["out"] is not None:
        return PythonCall(partial(fallback.into_out, func))
    if found.way == "out":
        return PythonCall(partial(without_out, func))
    if found.way == "each_mesh":
        return PythonCall(foreach.each_mesh(func))
    if found.way == "gather":
        return PythonCall(fallback.run_replicated(func, found.why, found.expected))
    return PythonCall(fallback.decompose_or_gather(func, found.why))


def again(func: Function, args: Sequence[Any], kwargs: Any) -> Any:
    """A call whose tensors come in another order, or stand for numbers."""
    args, kwargs = restated(func, args, kwargs or {}) or (args, kwargs or {})
    if any(type(t) is DistTensor for t in collect((args, kwargs), [])):
        return dispatch(DistTensor, func, (), args, kwargs)
    return func(*args, **kwargs)  # only the number was one


def by_value(
    func: Function, setting: Callable[[], Any] | None, args: Sequence[Any], kwargs: Any
) -> Any:
    """A call of a function whose rule depends on the value of a float, or on a setting."""
    kwargs = kwargs or {}
    try:
        key = func, *[key_of(a, floats=True) for a in (*args, *kwargs.items())]
    except Uncacheable:
        return carry_out(plan_of(func, args, kwargs, valued=True), args, kwargs, checked)
    if setting is not None:
        key = (*key, setting())
    planned = PLANS.get(key)
    if planned is None:  # the call without values was noted
        call = None if setting is None else _call(func, key)
        planned = _keep(key, plan_of(func, args, kwargs, valued=True), call)
    if planned.call is not None:
        note(planned)
    return carry_out(planned, args, kwargs, partial(_check, key))


def without_out(func: Function, args: Sequence[Any], kwargs: Any) -> Any:
    """A call with ``out=None``, which torch's own Python functions spell out."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    return dispatch(DistTensor, func, (), args, rest)
