"""Dispatches one call: from the user's function to the local function and back.

Warm call: a key, one look-up, and ``run`` of the plan that was made for the first call of this key.
Cold call: ``start`` plans the call, and keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from disttensor.cache import Cache
from disttensor.comm.compare_programs import CallSignature, record_call
from disttensor.dispatch import fallback, foreach
from disttensor.dispatch.call_plan import Answer, CallPlan, Planned, PythonCall
from disttensor.dispatch.key import depends_on_floats, describe_call, key_of, meshes_in
from disttensor.dispatch.outputs import check_outputs
from disttensor.dispatch.plan_call import plan_call
from disttensor.dispatch.resolve import HANDLERS, OF_KEY, resolve
from disttensor.dispatch.run import run, run_planned
from disttensor.dispatch.writes import note_error
from disttensor.errors import refuse_collectives
from disttensor.observe import begin_call, observers
from disttensor.pytree import Uncacheable, collect
from disttensor.tensor.dist_tensor import TRACERS, DistTensor, wait_for
from disttensor.torch_private import outside_function_modes
from ops.registry import RULES
from ops.signatures import read_numbers

Function = Callable[..., Any]

PLANS: Cache[Any, Planned] = Cache(16384)
_known = PLANS.get
# While a tracer of torch runs: the function that answers calls (disttensor.patches.tracers)
INTERCEPTORS: list[Function] = []


def dispatch(
    cls: type, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Any = None,
    *, key: Any = None,
) -> Any:  # fmt: skip
    """Implements ``DistTensor.__torch_function__`` where C does not. ``key``: of the call, if it is
    known."""
    if INTERCEPTORS and TRACERS.names:
        return INTERCEPTORS[0](func, args, kwargs or {})
    try:
        key = key or _key(func, args, kwargs)
    except Uncacheable:
        for t in collect((args, kwargs or {}), []):
            if isinstance(t, DistTensor):
                wait_for(t)
        uncached = plan_of(func, args, kwargs or {})
        begin_call(uncached)
        return run_planned(uncached, args, kwargs or {}, check_outputs)
    planned = _known(key)
    if planned is None:
        planned = start(func, args, kwargs, key)
    else:
        record_call(planned)
    if observers:
        begin_call(planned)
    try:
        if type(planned) is CallPlan and planned.is_checked:
            return run(planned, args, kwargs or {})
        return run_planned(planned, args, kwargs, partial(_check, key))
    except BaseException as error:
        note_error(error, planned, args[0] if args else None)
        raise


def _key(func: Function, args: Sequence[Any], kwargs: Any) -> Any:
    """Returns the key of a call. Raises Uncacheable."""
    key = (func, *[a.spec if type(a) is DistTensor else key_of(a, func) for a in args])
    if not kwargs:
        return key
    named = [v.spec if type(v) is DistTensor else key_of(v, func) for v in kwargs.values()]
    return key, *kwargs, *named


def start(func: Function, args: Sequence[Any], kwargs: Any, key: Any) -> Planned:
    """Plans the first call of a key, and records it."""
    planned = _keep(key, plan_of(func, args, kwargs or {}, key), _call(func, key))
    record_call(planned)
    return planned


def first_call(func: Function, args: Sequence[Any], kwargs: Any) -> tuple[Any, Planned | None]:
    """Runs a call of a kind that the C code has no plan for. Returns its result, and the plan for
    later calls; None if no plan was kept, or its results have not been checked yet."""
    try:
        key = _key(func, args, kwargs)
    except Uncacheable:
        return dispatch(DistTensor, func, (), args, kwargs), None
    result = dispatch(DistTensor, func, (), args, kwargs, key=key)
    planned = _known(key)
    if type(planned) is CallPlan and not (planned.is_checked or planned.reduce_first):
        return result, None
    return result, planned


def _keep(key: Any, planned: Planned, call: CallSignature | None) -> Planned:
    """Keeps a plan for calls of this key. ``call``: the description that ranks compare."""
    planned = PLANS[key] = replace(planned, call=call)
    return planned


def _check(key: Any, plan: CallPlan, out: Any) -> CallPlan:
    """Keeps the plan with the dtypes of the first results."""
    plan = PLANS[key] = check_outputs(plan, out)
    return plan


def _call(func: Function, key: Any) -> CallSignature:
    """Returns the description of a call of ``func`` that ranks compare. Its mesh is None if there
    is no other rank to compare with."""
    meshes = meshes_in(key)
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is not None and (len(mesh.ranks) == 1 or mesh.coordinate is None):
        mesh = None
    return CallSignature(lambda: describe_call(func, key), mesh, fallback.writes(func))


def plan_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None,
    valued: bool = False,
) -> Planned:  # fmt: skip
    """Plans calls like this one, outside of function modes. ``key``: the key of the call, if it has
    one; ``valued``: the plan may depend on the values of floats."""
    with outside_function_modes():
        rule = RULES.get(func)
        if rule is not None and not valued:
            floats = rule.floats and depends_on_floats((*args, *kwargs.values()))
            setting = None
            if rule.setting is not None:
                tensors = [t for t in collect((args, kwargs), []) if type(t) is DistTensor]
                setting = rule.setting([t.spec.layout for t in tensors])
            if floats or setting is not None:
                return PythonCall(func, dispatch_by_value, setting=setting)
        found = resolve(func, args, kwargs, key)
        if found.call is not None:
            return plan_call(found.call)
        if found.way == "handler":
            if func in OF_KEY:
                return Answer(HANDLERS[func](*args, **kwargs))
            return PythonCall(func, run_handler)
        if found.way == "out":
            is_none = kwargs["out"] is None
            return PythonCall(func, dispatch_without_out if is_none else fallback.run_into_out)
        if found.way == "numbers":
            return PythonCall(func, dispatch_with_numbers)
        if found.way == "each_mesh":
            return PythonCall(func, foreach.run_per_mesh)
        refuse_collectives(func)
        if found.way == "gather":
            return PythonCall(func, fallback.gather_and_run, found.why, found.expected)
        return PythonCall(func, fallback.run_body, found.why)


def run_handler(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the handler of a call."""
    return HANDLERS[planned.func](*args, **kwargs)


def dispatch_with_numbers(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dispatches a call with numbers in place of 0-d tensors and of NumPy's integers."""
    func = planned.func
    args, kwargs = read_numbers(func, args, kwargs) or (args, kwargs)
    if any(type(t) is DistTensor for t in collect((args, kwargs), [])):
        return dispatch(DistTensor, func, (), args, kwargs)
    return func(*args, **kwargs)  # the only DistTensor was replaced by a number


def dispatch_by_value(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a function whose rule depends on the value of a float, or on a setting."""
    func, setting = planned.func, planned.setting
    try:
        key = func, *[key_of(a, floats=True) for a in (*args, *kwargs.items())]
    except Uncacheable:
        return run_planned(plan_of(func, args, kwargs, valued=True), args, kwargs, check_outputs)
    if setting is not None:
        key = (*key, setting())
    found = PLANS.get(key)
    if found is None:  # the call without values was recorded
        call = None if setting is None else _call(func, key)
        found = _keep(key, plan_of(func, args, kwargs, valued=True), call)
    if found.call is not None:
        record_call(found)
        begin_call(found)
    return run_planned(found, args, kwargs, partial(_check, key))


def dispatch_without_out(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dispatches a call without its ``out=None``, which torch's own Python functions pass."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    return dispatch(DistTensor, planned.func, (), args, rest)
