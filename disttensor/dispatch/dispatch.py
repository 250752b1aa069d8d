"""The path of one call, from the user's function to the local one and back.

Warm: a key, one look-up, and the runner that was chosen when the plan was made. Cold: ``start``
has the call resolved, and keeps a runner for calls like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from disttensor.cache import Cache
from disttensor.comm.program import Call, note
from disttensor.dispatch import execute, fallback, foreach
from disttensor.dispatch.key import (
    Uncacheable,
    depends_on_floats,
    key_of,
    meshes_in,
    words_of,
)
from disttensor.dispatch.resolve import HANDLERS, OF_KEY, resolve
from disttensor.pytree import collect
from disttensor.recipe import Runner
from disttensor.tensor.dist_tensor import DistTensor, arrived
from ops.registry import RULES
from ops.signatures import restated

Function = Callable[..., Any]

PLANS: Cache[Any, Runner] = Cache(16384)
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
        return runner_of(func, args, kwargs or {}, None)(args, kwargs or {})
    run = _known(key)
    if run is None:
        run = start(func, args, kwargs, key)
    else:
        note(run)
    return run(args, kwargs)


def start(func: Function, args: Sequence[Any], kwargs: Any, key: Any) -> Runner:
    """The runner of the first call of a key, which is noted."""
    call = _call(func, key)
    keep = partial(_keep, key, call)
    run = keep(runner_of(func, args, kwargs or {}, keep, key))
    note(call)  # this runner holds on to the arguments
    return run


def first_call(func: Function, args: Sequence[Any], kwargs: Any) -> tuple[Any, Runner | None]:
    """A call of a kind that the C code does not know: its result, and what carries out the next
    ones; None where nothing was kept."""
    try:
        key: Any = (func, *[key_of(a) for a in args])
        if kwargs:
            key = (key, *kwargs, *[key_of(v) for v in kwargs.values()])
    except Uncacheable:
        return dispatch(DistTensor, func, (), args, kwargs), None
    run = _known(key)
    if run is None:
        run = start(func, args, kwargs, key)
    else:
        note(run)
    return run(args, kwargs), _known(key)


def _keep(key: Any, call: Call | None, run: Any) -> Runner:
    """``run`` carries out calls of this key, from now on. ``call``: what it is to other ranks."""
    run.call = call
    PLANS[key] = run
    return run


def _call(func: Function, key: Any) -> Call:
    """A call of ``func`` as ranks compare it; on no mesh where this rank has nobody to compare
    with."""
    meshes = meshes_in(key)
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is not None and (mesh.size == 1 or mesh.coordinate is None):
        mesh = None
    return Call(lambda: words_of(func, key), mesh, fallback.writes(func))


def runner_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any],
    keep: Callable[[Runner], Any] | None, key: Any = None, valued: bool = False,
) -> Runner:  # fmt: skip
    """What carries out calls like this one. ``keep``: takes a faster one after the first call;
    ``key``: its own, if it has one; ``valued``: it may depend on the values of floats."""
    rule = RULES.get(func)
    if rule is not None and restated(func, args, kwargs):
        return partial(again, func)
    if rule is not None and not valued:
        floats = rule.floats and depends_on_floats((*args, *kwargs.values()))
        setting = None
        if rule.setting is not None:
            tensors = [t for t in collect((args, kwargs), []) if type(t) is DistTensor]
            setting = rule.setting([t.spec.layout for t in tensors])
        if floats or setting is not None:
            return partial(by_value, func, setting)
    found = resolve(func, args, kwargs, key)
    if found.plan is not None:
        return execute.runner_of(found.plan, args, kwargs, keep)
    if found.way == "handler":
        answer = HANDLERS[func]
        if func in OF_KEY:
            return execute.answering(answer(*args, **kwargs))
        return lambda args, kwargs: answer(*args, **(kwargs or {}))
    if found.way == "out" and kwargs["out"] is not None:
        return lambda args, kwargs: fallback.into_out(func, args, kwargs)
    if found.way == "out":
        return partial(without_out, func)
    if found.way == "each_mesh":
        return foreach.each_mesh(func)
    if found.way == "gather":
        return fallback.run_replicated(func, found.why, found.expected)
    return fallback.decompose_or_gather(func, found.why)


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
        return runner_of(func, args, kwargs, None, valued=True)(args, kwargs)
    if setting is not None:
        key = (*key, setting())
    run: Any = PLANS.get(key)
    if run is None:  # the call without values was noted
        call = None if setting is None else _call(func, key)
        keep = partial(_keep, key, call)
        run = keep(runner_of(func, args, kwargs, keep, valued=True))
    if run.call is not None:
        note(run)
    return run(args, kwargs)


def without_out(func: Function, args: Sequence[Any], kwargs: Any) -> Any:
    """A call with ``out=None``, which torch's own Python functions spell out."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    return dispatch(DistTensor, func, (), args, rest)
