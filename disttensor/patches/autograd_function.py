"""Custom autograd functions on DistTensors: run on the whole locals, as a function without a rule.

They differentiate what they are given, and the wrapper is in no graph: with it the gradient would
be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from disttensor.cache import Cache
from disttensor.dispatch.fallback import run_replicated
from disttensor.errors import CustomFunctionError, user_line
from disttensor.tensor.awaited import Awaited
from disttensor.tensor.dist_tensor import DistTensor, arrived

_OURS = frozenset({DistTensor, Awaited})
_runners: Cache[Any, Callable[..., Any]] = Cache(256)


def on_whole_locals(original: Any) -> Any:
    """``Function.apply``, as the class holds it: a classmethod, in C since torch 2.14."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        if _OURS.isdisjoint(map(type, args)):
            return call(*args, **kwargs)
        for a in args:
            if isinstance(a, DistTensor):
                arrived(a)
        if cls is CheckpointFunction:
            _refuse_reentrant()
            return call(*args, **kwargs)
        return (_runners.get(cls) or _runner(cls, call))(args, kwargs)

    # By its file torch.compile knows that ``torch.compile(F.apply)`` is a custom function's call.
    apply.__code__ = apply.__code__.replace(co_filename=torch.autograd.function.__file__)
    return classmethod(apply)


def _runner(cls: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs are gathered, the results are replicated; said once for each class."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    apply.__qualname__, apply.__module__ = f"{cls.__qualname__}.apply", cls.__module__
    why = "a custom autograd.Function; local_map(F.apply, ...) runs it on pieces"
    run = _runners[cls] = run_replicated(apply, why)
    return run


def _refuse_reentrant() -> None:
    if torch.is_grad_enabled():
        raise CustomFunctionError(
            f"checkpoint at {user_line()}: the reentrant variant is a custom autograd function and "
            "would cut the graph of a DistTensor; call checkpoint(..., use_reentrant=False)"
        )
