"""``replay``: records the local program of a module or a function once for each kind of call.

A replay sends the same messages as the recorded run, in the same order. So a rank may replay a call
that another rank runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from disttensor.checks import check_callable
from disttensor.comm.compare_programs import CALLS
from disttensor.dispatch import strict
from disttensor.observe import observers, observers_of_thread
from disttensor.pytree import Uncacheable
from disttensor.tensor.dist_tensor import TRACERS, DistTensor
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.views import shares_memory
from disttensor.torch_private import count_function_modes
from disttensor.trace import check
from disttensor.trace.code_guard import CodeGuard
from disttensor.trace.code_watch import CodeWatch
from disttensor.trace.guarded_forward import ForwardCall, GuardedForward, device_of
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.record import Program, record

Tensor = torch.Tensor
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


def replay(target: F) -> F:
    """Returns ``target``, a module or a function of DistTensors, that runs its local program as
    straight-line code from the second call of a kind on.

    A module is returned itself, with its own ``forward``. Results, gradients, random numbers and
    communication are the same as in eager calls. A call that cannot be recorded runs eagerly;
    ``why()`` of the forward, or of the function, returns the reasons. All ranks must call
    ``replay`` alike.

    >>> model = dt.shard_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), mesh)
    >>> model = dt.replay(model)
    >>> for _ in range(3):
    ...     loss = model(dt.ones(2, 4, mesh=mesh)).sum()
    >>> model.forward.replays, model.forward.why()
    (2, [])
    """
    if isinstance(target, nn.Module):
        held = target.__dict__.get("forward")
        if held is None:
            Replay(target).put()
        elif not isinstance(held, InstanceForward):  # a Skip stays: it computes nothing
            raise ValueError(
                f"replay: the forward of this {type(target).__name__} was put on the instance; "
                "give a function that calls it: replay(lambda *args: module(*args))"
            )
        return target
    check_callable("replay: target", target, "a module, or a function of DistTensors")
    return target if isinstance(target, Replay) else Replay(target)  # type: ignore[return-value]


class Replay(GuardedForward):
    """The forward of a module, or a function, and its recorded programs. ``programs``: their
    texts. ``merges``: consecutive permutations of dims are one call of a program."""

    merges: ClassVar[bool] = True

    @property
    def programs(self) -> list[str]:
        return [program.text for program in self.recorded()]

    def new_guard(self, watch: CodeWatch | None = None) -> CodeGuard:
        guard = super().new_guard(watch)
        if any(collector_of(t) is not None for t in guard.tensors if isinstance(t, DistTensor)):
            guard.why = "its parameters are in sharded segments (shard_data_parallel)"
        return guard

    def must_run(self) -> bool:
        return bool(
            count_function_modes()
            or strict.strict.current()
            or TRACERS.names
            or (observers and any(o.sees_modules for o in observers_of_thread()))
        )

    def key_of_tensor(self, x: Any) -> Any:
        kind, is_ours = type(x), isinstance(x, DistTensor)
        if is_ours and shares_memory(x):
            raise Uncacheable("an argument shares memory in a way that is looked at in each call")
        if not is_ours and kind not in (Tensor, nn.Parameter):
            raise Uncacheable(f"an argument is a {kind.__name__}")
        if is_ours:
            return x.spec, x._is_param, *_flags(x)
        return kind, x.shape, x.dtype, x.device, x.requires_grad, x.is_leaf, x.stride()

    def unfit(self, call: ForwardCall) -> str:
        return _unfit((*call.inputs, *call.guard.tensors))

    def trace(self, call: ForwardCall) -> tuple[Any, Program | str]:
        sources, parameters = sources_of(call)
        return record(call.forward, sources, parameters, device_of(call.inputs), self.merges)

    def run(self, program: Program, inputs: Sequence[Any]) -> Any:
        if program.calls:
            CALLS.extend(program.calls)
        return program.run(*inputs)

    def audit(self, program: Program, call: ForwardCall) -> tuple[Any, str]:
        result, again = Replay.trace(self, call)
        return result, check.difference(program, again)


def sources_of(call: ForwardCall) -> tuple[dict[str, Any], list[str]]:
    """Returns the tensors that a program starts from, by name, and the names of its parameters."""
    sources = {f"x{i}": x for i, x in enumerate(call.inputs)}
    parameters = [*sources]
    return sources | {f"p{i}": t for i, t in enumerate(call.guard.tensors)}, parameters


def _flags(x: DistTensor) -> tuple[Any, ...]:
    """Returns properties of an argument, other than its spec, that a program may depend on."""
    local = x.local
    if local.requires_grad:
        return True, local.is_leaf, local.stride()
    return False, local.is_inference(), local.stride(), None


def _unfit(tensors: Sequence[Any]) -> str:
    """Returns the reason why calls of these tensors are not recorded, or ""."""
    dist = [t for t in tensors if type(t) is DistTensor]
    if not all(t.is_initialized for t in dist):
        return "this rank is outside the mesh, where nothing is computed"
    if any(t.spec.layout.partial for t in dist):
        return "it reads a pending sum from outside, which may have been reduced before"
    if any(t.spec.layout.custom for t in dist):
        return "a placement of a type of the user's"
    if len({id(getattr(t, "local", t)) for t in tensors}) < len(tensors):
        return "two of its tensors are one local"
    if any(type(t) not in (DistTensor, Tensor, nn.Parameter) for t in tensors):
        return "it reads a tensor of another class"
    return ""
