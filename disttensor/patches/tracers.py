"""Tracers and transforms of torch, which follow a tensor through C++ or by its class: they would
follow the empty wrapper of a DistTensor, or take its local for a constant.

While one of them runs, calls on a DistTensor are handled here instead of in ``dispatch``; at other
times there is no cost. An input of a transform arrives below ``__torch_function__``, where
``DistTensor.__torch_dispatch__`` raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import iter_modules
from threading import Lock
from typing import Any

from disttensor.dispatch import dispatch, native
from disttensor.dispatch.fallback import writes
from disttensor.errors import name_of, user_line
from disttensor.patches.change import Undo, once_imported
from disttensor.pytree import collect, substitute
from disttensor.tensor.dist_tensor import TRACERS, WAY_OUT, DistTensor
from disttensor.torch_private import outside_transforms

Function = Callable[..., Any]


# Packages whose functions Dynamo traces: they stand in front of torch's, or in graphs.
_IN_FRONT = {"graphs", "nn", "optim", "patches"}

# Inside these alone a DistTensor is a constant.
GATHERING = {
    "torch.func.grad or vjp", "torch.func.vmap", "torch.func.jvp",
    "torch.autograd.forward_ad.dual_level",
}  # fmt: skip


_counting = Lock()


def _enter(name: str) -> None:
    TRACERS.names += (name,)
    with _counting:
        dispatch.INTERCEPTORS.append(_answer)
        native.choose()


def _leave() -> None:
    TRACERS.names = TRACERS.names[:-1]
    with _counting:
        dispatch.INTERCEPTORS.pop()
        native.choose()


def _answer(func: Function, args: Any, kwargs: Any) -> Any:
    """Runs a call on a DistTensor while a tracer runs on this thread. vmap, grad, vjp and jvp treat
    DistTensors as constants: their values are gathered, and the result is a regular tensor."""
    names = TRACERS.names
    dist = [t for t in collect((args, kwargs), []) if isinstance(t, DistTensor)]
    written = writes(func) and args and isinstance(args[0], DistTensor)
    if written or not {*names} <= GATHERING or not all(t.is_initialized for t in dist):
        raise NotImplementedError(
            f"{name_of(func)} of a DistTensor at {user_line()}, inside {names[-1]}: it follows "
            f"regular tensors only. {WAY_OUT}"
        )

    TRACERS.names = ()  # of this thread: others may follow a tensor meanwhile
    try:
        with outside_transforms():
            wholes = {id(t): t.full_tensor() for t in dist}
    finally:
        TRACERS.names = names
    call = substitute((tuple(args), kwargs), lambda t: wholes.get(id(t), t))
    return func(*call[0], **call[1])


def wrap_begin(name: str) -> Function:
    """Wraps a function with which this tracer begins."""

    def around(original: Function) -> Function:
        def enter(*args: Any, **kwargs: Any) -> Any:
            entered = original(*args, **kwargs)
            _enter(name)
            return entered

        return enter

    return around


def wrap_end(original: Function) -> Function:
    """Wraps the function with which a tracer ends."""

    def leave(*args: Any, **kwargs: Any) -> Any:
        _leave()
        return original(*args, **kwargs)

    return leave


def wrap_tracer(name: str) -> Function:
    """Wraps a function that is this tracer."""

    def around(original: Function) -> Function:
        def trace(*args: Any, **kwargs: Any) -> Any:
            _enter(name)
            try:
                return original(*args, **kwargs)
            finally:
                _leave()

        return trace

    return around


def wrap_warn_once(original: Function) -> Function:
    """Wraps Dynamo's warnings, each of which is given once."""

    def warn_once(msg: str, *args: Any, **kwargs: Any) -> Any:
        if "`disttensor.dispatch._native." in msg:
            return None
        return original(msg, *args, **kwargs)

    return warn_once


def skip_our_frames() -> Undo:
    """Makes Dynamo run the frames of our packages in Python, and break its graphs there. It would
    confuse two closures that have the same code. It still traces wrappers of torch's functions,
    for regular tensors."""

    def skip(rules: Any) -> Undo:
        packages = [module.name for module in iter_modules([str(Path(__file__).parents[1])])]
        ours = [f"disttensor.{name}" for name in packages if name not in _IN_FRONT]
        before = len(rules.SKIP_DIRS)
        for name in ("ops", "reshard", *ours):
            rules.add(name)
        added = rules.SKIP_DIRS[before:]

        def undo() -> None:
            for folder in added:
                rules.SKIP_DIRS.remove(folder)
            rules._recompile_re()

        return undo

    return once_imported("torch._dynamo.trace_rules", skip)
