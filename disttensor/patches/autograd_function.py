"""Custom autograd functions on DistTensors: run on gathered locals, as a function without a rule.

They differentiate their arguments, and the wrapper is in no graph: with the wrapper as an argument
the gradient would be lost silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from disttensor.cache import Cache
from disttensor.dispatch.call_plan import PythonCall
from disttensor.dispatch.fallback import gather_and_run
from disttensor.errors import CustomFunctionError, refuse_collectives, user_line
from disttensor.observe import begin_call, observers, run_step
from disttensor.patches.whole_function import GIVEN, on_wholes
from disttensor.pytree import collect
from disttensor.tensor.awaited import Awaited
from disttensor.tensor.dist_tensor import DistTensor, wait_for

_OURS = frozenset({DistTensor, Awaited})
_runners: Cache[Any, Callable[..., Any]] = Cache(256)


def wrap_apply(original: Any) -> Any:
    """Wraps ``Function.apply`` in the form of the class dict: a classmethod, in C since 2.14."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        if _OURS.isdisjoint(map(type, args)):
            out = run_step(call, *args, **kwargs) if observers else call(*args, **kwargs)
            _check_results(cls, args, out)
            return out
        for a in args:
            if isinstance(a, DistTensor):
                wait_for(a)
        if cls is CheckpointFunction:
            _refuse_reentrant()
            return call(*args, **kwargs)
        return (_runners.get(cls) or _runner(cls, original))(args, kwargs)

    # By its file torch.compile knows that ``torch.compile(F.apply)`` is a custom function's call.
    apply.__code__ = apply.__code__.replace(co_filename=torch.autograd.function.__file__)
    return classmethod(apply)


def _runner(cls: Any, original: Any) -> Callable[..., Any]:
    """Returns what gathers the inputs, runs ``cls`` and replicates the results."""
    call = original.__get__(None, on_wholes(cls))

    def apply(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    apply.__qualname__, apply.__module__ = f"{cls.__qualname__}.apply", cls.__module__
    refuse_collectives(apply)
    why = "a custom autograd.Function; local_map(F.apply, ...) runs it on pieces"
    planned = PythonCall(apply, gather_and_run, why)

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        begin_call(planned)
        before = GIVEN.set(args)
        try:
            return gather_and_run(planned, args, kwargs)
        finally:
            GIVEN.reset(before)

    _runners[cls] = run
    return run


def _check_results(cls: Any, args: Sequence[Any], out: Any) -> None:
    """Raises CustomFunctionError if regular tensors that require grad gave DistTensors: the graph
    would end there."""
    found = any(type(x) in _OURS for x in (out if isinstance(out, tuple) else (out,)))
    if found and torch.is_grad_enabled() and any(t.requires_grad for t in collect(args, [])):
        raise CustomFunctionError(
            f"{cls.__qualname__}.apply at {user_line()}: no argument is a DistTensor, but the "
            "forward returned one, made of DistTensors that it reads from outside; its gradient "
            "would be lost. Give apply a DistTensor: dt.shard_tensor(x, mesh), or a parameter that "
            "the function reads"
        )


def _refuse_reentrant() -> None:
    if torch.is_grad_enabled():
        raise CustomFunctionError(
            f"checkpoint at {user_line()}: the reentrant variant is a custom autograd function and "
            "would cut the graph of a DistTensor; call checkpoint(..., use_reentrant=False)"
        )
