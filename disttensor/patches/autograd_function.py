"""Custom autograd functions on DistTensors: run on gathered locals, as a function without a rule.

They differentiate their arguments, and the wrapper is in no graph: with the wrapper as an argument
the gradient would be lost silently.

The code of a function may also use DistTensors of a closure or a module: results and gradients that
are DistTensors are gathered, and ``torch.autograd.grad`` finds the DistTensors of the full
arguments (``DIST_ARGUMENTS``). The state around its forward, such as gathered parameters, is set up
again for its backward. Random numbers of regular tensors are drawn alike on all ranks in both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from disttensor import callbacks
from disttensor.cache import Cache
from disttensor.dispatch.call_plan import PythonCall
from disttensor.dispatch.fallback import gather_and_run
from disttensor.errors import CustomFunctionError, refuse_collectives, user_line
from disttensor.observe import begin_call, observers, run_step
from disttensor.pytree import collect, substitute
from disttensor.random.draws import LaterDraws
from disttensor.tensor.awaited import Awaited
from disttensor.tensor.backward import DIST_ARGUMENTS
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from disttensor.tensor.reshard import resharded_local

_OURS = frozenset({DistTensor, Awaited})
_runners: Cache[Any, Callable[..., Any]] = Cache(256)
# The arguments of the present call, before they were gathered, and the numbers of its backward
GIVEN: ContextVar[tuple[Sequence[Any], Any]] = ContextVar("arguments of a custom function")


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
        draws = LaterDraws(collect(args, [], DistTensor)[0].spec.mesh)
        with callbacks.set_during(GIVEN, (args, draws)):
            return gather_and_run(planned, args, kwargs)

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


# On full tensors ----------------------------------------------------------------------------------


def on_wholes(cls: Any) -> Any:
    """Returns a subclass of ``cls`` that takes and returns regular tensors only."""
    if cls.setup_context is not Function.setup_context:

        def forward_alone(*args: Any) -> Any:
            return _run(cls.forward, _behind(args), *args)[0]

        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            _prepare(ctx, inputs)
            return cls.setup_context(ctx, inputs, output)

        functions: dict[str, Any] = {"forward": forward_alone, "setup_context": setup_context}
    else:

        def forward(ctx: Any, *args: Any) -> Any:
            _prepare(ctx, args)
            out, made = _run(cls.forward, ctx.behind, ctx, *args)
            if made and ctx.non_differentiable:
                ctx.mark_non_differentiable(*[made.get(id(t), t) for t in ctx.non_differentiable])
            return out

        functions = {"forward": forward}
    name = "backward" if cls.vjp is Function.vjp else "vjp"

    def backward(ctx: Any, *grads: Any) -> Any:
        with ExitStack() as stack:
            for set_up in ctx.around:
                stack.enter_context(set_up())
            return _run(getattr(cls, name), ctx.behind, ctx, *grads)[0]

    functions[name] = backward
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(
        cls.__name__, (cls,), names | {k: staticmethod(f) for k, f in functions.items()}
    )


def _prepare(ctx: Any, inputs: Sequence[Any]) -> None:
    """Keeps what the backward needs."""
    ctx.behind = _behind(inputs)
    ctx.around = [*callbacks.recompute_contexts().values(), GIVEN.get()[1].seeded]


def _behind(wholes: Sequence[Any]) -> WeakTensorKeyDictionary:
    """Returns weak references to the DistTensors of which the whole arguments were made: the node
    must not keep them alive."""
    pairs = zip(wholes, GIVEN.get()[0], strict=False)
    found = {t: weakref.ref(x) for t, x in pairs if isinstance(x, MeshTensor)}
    return WeakTensorKeyDictionary(found)


def _run(
    function: Callable[..., Any], behind: WeakTensorKeyDictionary, *args: Any
) -> tuple[Any, dict[int, Tensor]]:
    """Runs the user's function. Returns its results, and the whole tensor for each DistTensor among
    them, by identity."""
    made: dict[int, Tensor] = {}

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, MeshTensor):
            return x
        if id(x) not in made:
            if x.is_initialized:
                made[id(x)] = resharded_local(x, x.spec.replicated(), ())
            else:  # outside the mesh the function runs on tensors without data
                made[id(x)] = collect(args, [])[0].new_empty(x.spec.shape, dtype=x.spec.dtype)
        return made[id(x)]

    alive = WeakTensorKeyDictionary({t: x for t, ref in behind.items() if (x := ref()) is not None})
    with callbacks.set_during(DIST_ARGUMENTS, alive):
        return substitute(function(*args), whole), made
