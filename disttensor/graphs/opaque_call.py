"""Calls of locals that torch.compile does not look into: an operator runs them as eager code does.

A line of a program is such a call if it draws random numbers, communicates in a way of its own or
has a backward of its own. The operator ``call`` runs the line with autograd. It returns the results
and a *graph tensor*: the storage of that tensor holds the edges of autograd's graph, as long as
compiled code keeps it for the backward. The operator ``call_backward`` differentiates this graph.

Compiled code may write to the memory of arguments and results once it has no other use for them.
So the graph saves copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from disttensor.graphs.traced_comm import number_of, numbered, small_tensor
from disttensor.pytree import CONSTANTS
from disttensor.settings import snapshot
from disttensor.torch_private import direct_apply, dispatch_state, storage_id
from disttensor.trace.expression import Apply, Constant, define, names, show_line
from disttensor.trace.tape import Line, LocalMeta

Tensor = torch.Tensor
Function = Callable[..., Any]


class OpaqueCall(NamedTuple):
    """``func(*given)`` returns the list ``made``; ``dispatched``: a context with the autocast of
    the recorded call, taken when the first call compiles it."""

    func: Callable[..., list[Tensor]]
    given: tuple[LocalMeta, ...]
    made: tuple[LocalMeta, ...]
    dispatched: Callable[[], Any]


def opaque(line: Line, value: Apply, func: Function, scope: dict[str, Any]) -> tuple[Any, Apply]:
    """Returns target and value of a line that makes the call ``value`` of ``func`` as one
    operator."""
    assert line.call is not None
    given, made = line.call.given, line.call.made
    used = sorted({*names((value.args, value.kwargs), Constant)})
    values: dict[str, Any] = {name: scope[name] for name in used}
    values["func"] = func
    held = identities(values.values())
    call = show_line(line.target, value._replace(func=Constant("func")))
    run, text = define("line", given, [call], [*made], values)
    metas = (*given.values(),), (*made.values(),)
    device = next((m.device.type for some in metas for m in some), "cpu")
    key = text, held, metas, snapshot(device)
    number = number_of(OpaqueCall(run, *metas, dispatch_state()), key)
    scope["traced_call"] = traced_call
    flags = [tuple(m.requires_grad for m in some) for some in metas]
    return [*made], Apply(Constant("traced_call"), (*flags, number, *given))


def identities(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns a key of constants by value, and of other objects by identity, as long as they
    live."""
    # 0.0 is not -0.0
    return tuple([(type(v), repr(v)) if type(v) in CONSTANTS else id(v) for v in values])


class _Enter(torch.autograd.Function):
    """Returns ``x``, where the graph of a call begins. The graph itself does not keep ``x``."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, x: Tensor) -> Tensor:
        return x.detach()


_enter = direct_apply(_Enter)


def _call(given: Sequence[Tensor], number: int) -> list[Tensor]:
    call = numbered(number)
    tracked = any(m.requires_grad for m in call.made)
    graph = small_tensor()
    with call.dispatched(), torch.set_grad_enabled(tracked):
        begin = torch.empty(0, requires_grad=True)
        inside = [
            _enter(begin, x) if m.requires_grad and tracked else x.detach()
            for x, m in zip(given, call.given, strict=True)
        ]
        shared = _memory(given)
        of_given = frozenset(shared)

        def save(x: Tensor) -> Tensor:
            if _memory([x]) <= of_given:
                return x.detach().clone()
            shared.update(_memory([x]))
            return x

        with saved_tensors_hooks(save, lambda x: x):
            out = call.func(*inside)
        if tracked:
            edges = ([get_gradient_edge(x) for x in ts if x.requires_grad] for ts in (out, inside))
            graph.untyped_storage().edges = tuple(edges)  # type: ignore[attr-defined]
    return [*_unshared(out, call.made, shared), graph]


def _back(grads: Sequence[Tensor], graph: Tensor, number: int) -> list[Tensor]:
    edges = getattr(graph.untyped_storage(), "edges", None)
    if edges is None:
        raise RuntimeError(
            "the graph of a call in a compiled program is gone: its tensor was copied between "
            "forward and backward, as hooks of saved tensors do. Compile without such hooks"
        )
    out, given = edges
    found = torch.autograd.grad(out, given, grads, retain_graph=True, allow_unused=True)
    metas = _tracked(number)
    whole = [_empty(m).zero_() if g is None else g for g, m in zip(found, metas, strict=True)]
    return _unshared(whole, metas, _memory(grads))


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {storage_id(x.untyped_storage()) for x in tensors}


def _unshared(out: Sequence[Tensor], metas: Sequence[LocalMeta], shared: set[int]) -> list[Tensor]:
    """Returns the tensors with the strides of their metadata, in memory of their own: copies, where
    they have others."""
    found = []
    for x, m in zip(out, metas, strict=True):
        if x.stride() != m.stride or _memory([x]) & shared:
            x = _empty(m).copy_(x.detach())
        shared.update(_memory([x]))
        found.append(x.detach())
    return found


def _fake_call(given: Sequence[Tensor], number: int) -> list[Tensor]:
    return [*map(_empty, numbered(number).made), small_tensor()]


def _fake_back(grads: Sequence[Tensor], graph: Tensor, number: int) -> list[Tensor]:
    return [*map(_empty, _tracked(number))]


def _tracked(number: int) -> list[LocalMeta]:
    return [m for m in numbered(number).given if m.requires_grad]


def _empty(m: LocalMeta) -> Tensor:
    return torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=m.device)


OPERATORS = (
    ("call(Tensor[] given, int number) -> Tensor[]", _call, _fake_call),
    ("call_backward(Tensor[] grads, Tensor graph, int number) -> Tensor[]", _back, _fake_back),
)


class _TracedCall(torch.autograd.Function):
    """``grads``, ``results``: which of the given tensors and of the results require grad."""

    @staticmethod
    def forward(ctx: Any, grads: Any, results: Any, number: int, *given: Tensor) -> Any:
        *made, graph = torch.ops.disttensor.call(given, number)
        ctx.how = grads, results, number
        ctx.save_for_backward(graph)
        ctx.mark_non_differentiable(*[x for x, grad in zip(made, results, strict=True) if not grad])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        grads, results, number = ctx.how
        (graph,) = ctx.saved_tensors
        whole = [g for g, grad in zip(given, results, strict=True) if grad]
        found = iter(torch.ops.disttensor.call_backward(whole, graph, number))
        return None, None, None, *[next(found) if grad else None for grad in grads]


def traced_call(grads: Any, results: Any, number: int, *given: Tensor) -> Any:
    if any(results):
        return _TracedCall.apply(grads, results, number, *given)
    return torch.ops.disttensor.call([x.detach() for x in given], number)[:-1]
