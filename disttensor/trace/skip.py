"""Skips whole modules whose parameters are on other ranks: their results follow from the metadata
of their inputs.

On a rank off the mesh of its parameters a module gets a Skip as its ``forward``. The first call of
a kind runs the real forward on tokens (``off_mesh_program.trace``) and records its results; later
calls are one look-up. A forward with effects that a skipped call would miss runs call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from disttensor.checks import check_type
from disttensor.pytree import Uncacheable
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import count_function_modes
from disttensor.trace.code_guard import CodeGuard
from disttensor.trace.code_watch import CodeWatch
from disttensor.trace.guarded_forward import ForwardCall, GuardedForward
from disttensor.trace.module_guard import are_elsewhere
from disttensor.trace.off_mesh_program import OffMeshProgram, trace

_Module = TypeVar("_Module", bound=nn.Module)


def never_skip(module: _Module) -> _Module:
    """Makes the forward of ``module``, and of modules around it, run on every rank, on whatever
    mesh its parameters are. Returns the module.

    Needed for a forward with effects that are not visible from outside: it prints, or depends on
    values that change and are no attribute, global or closure of its code. All ranks must call this
    alike.

    >>> model = torch.nn.Sequential(dt.pipeline.never_skip(torch.nn.Linear(4, 4)), torch.nn.ReLU())
    >>> model = dt.shard_module(model, mesh)
    """
    check_type("never_skip: module", module, nn.Module, "a module")
    module._never_skip = True  # type: ignore[assignment]
    return module


def skip(module: _Module) -> _Module:
    """Makes ``module``, or the modules in it that are worth it, skip their forward on ranks that
    have none of its parameters: from the second call of a kind on its results are known. Returns
    the module. ``pipeline.split`` does this for the layers of stages. All ranks must call this
    alike.

    >>> model = dt.shard_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), mesh)
    >>> model = dt.pipeline.skip(model)
    """
    check_type("skip: module", module, nn.Module, "a module")
    for m in module.modules():
        worth = bool(m._modules) or not type(m).__module__.startswith("torch.nn")
        callable_ = type(m).forward is not nn.Module.forward and "forward" not in m.__dict__
        tensors = [*m.parameters(), *m.buffers()]
        if worth and callable_ and tensors and are_elsewhere(tensors):
            Skip(m).put()
    return module


class Skip(GuardedForward):
    """The ``forward`` of one module on a rank off the mesh."""

    logs = False
    most_assignments = 0  # all micro-batches of a step run alike

    def must_run(self) -> bool:
        return count_function_modes() > 0  # among them: the mode that traces a module around it

    def new_guard(self, watch: CodeWatch | None = None) -> CodeGuard:
        guard = super().new_guard(watch)
        for m in guard.trees[0].modules:
            if getattr(type(m), "_never_skip", False) or "_never_skip" in m.__dict__:
                guard.why = "never_skip"
            elif type(m.__dict__.get("forward")) not in (type(None), Skip):
                guard.why = "a forward that was put on an instance"
        if not guard.trees[0].elsewhere:
            guard.why = guard.why or "its tensors are on this rank"
        return guard

    def key_of_tensor(self, x: Any) -> Any:
        if not isinstance(x, DistTensor):
            raise Uncacheable("an argument is a torch.Tensor")
        state = x._view_state
        strides = None if state is None else state.strides
        return x.spec, x.local.requires_grad, x._is_param, strides

    def key_of_own(self, guard: CodeGuard) -> None:
        """Returns None: the guard of the module compares its tensors."""

    def attributes_as_inputs(self, guard: CodeGuard) -> Sequence[Any]:
        attached = guard.trees[0].attached
        return [attributes.get(name) for attributes, name in attached] if attached else ()

    def unfit(self, call: ForwardCall) -> str:
        if not call.inputs or any(x.is_initialized for x in call.inputs):
            return "an input is on this rank, or there is none"
        return ""

    def trace(self, call: ForwardCall) -> tuple[Any, OffMeshProgram | str]:
        return trace(call.forward, call.inputs, call.guard.trees[0].tensors)

    def audit(self, program: OffMeshProgram, call: ForwardCall) -> tuple[Any, str]:
        result, again = self.trace(call)
        return result, again if isinstance(again, str) else program.difference(again)

    def run(self, program: OffMeshProgram, inputs: Sequence[Any]) -> Any:
        return program.run(inputs)
