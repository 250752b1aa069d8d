"""Runs a custom autograd function on full tensors instead of DistTensors.

Its code may also use DistTensors of a closure or a module: results and gradients that are
DistTensors are gathered, and ``torch.autograd.grad`` finds the DistTensors of the full arguments
(``DIST_ARGUMENTS``). The state around its forward, such as gathered parameters, is set up again for
its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import Function
from torch.utils.weak import WeakTensorKeyDictionary

from disttensor import callbacks
from disttensor.pytree import collect, substitute
from disttensor.tensor.backward import DIST_ARGUMENTS
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.reshard import resharded_local

Tensor = torch.Tensor

# The arguments of the present call, before they were gathered
GIVEN: ContextVar[Sequence[Any]] = ContextVar("arguments of a custom function", default=())


def on_wholes(cls: Any) -> Any:
    """Returns a subclass of ``cls`` that takes and returns regular tensors only."""
    if cls.setup_context is not Function.setup_context:

        def forward_alone(*args: Any) -> Any:
            return _run(cls.forward, _behind(args), *args)[0]

        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            ctx.behind, ctx.around = _behind(inputs), [*callbacks.recompute_contexts.values()]
            return cls.setup_context(ctx, inputs, output)

        functions: dict[str, Any] = {"forward": forward_alone, "setup_context": setup_context}
    else:

        def forward(ctx: Any, *args: Any) -> Any:
            ctx.behind, ctx.around = _behind(args), [*callbacks.recompute_contexts.values()]
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


def _behind(wholes: Sequence[Any]) -> WeakTensorKeyDictionary:
    """Returns the DistTensor that each whole argument was made of."""
    pairs = zip(wholes, GIVEN.get(), strict=False)
    return WeakTensorKeyDictionary({t: x for t, x in pairs if isinstance(x, MeshTensor)})


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

    before = DIST_ARGUMENTS.set(behind)
    try:
        return substitute(function(*args), whole), made
    finally:
        DIST_ARGUMENTS.reset(before)
