"""``compile``: gives the recorded program of a module or a function to ``torch.compile``.

A recorded program (``replay``) has three parts. It reads the locals of its sources, calls functions
of locals, and makes DistTensors of the results. Most calls are plain PyTorch. A reshard becomes an
ordinary autograd function around an operator that Dynamo and AOTAutograd trace. A local function
that communicates or draws is one operator (``opaque_call``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

from torch import nn

from disttensor import callbacks
from disttensor.autograd.activation_checkpoint import (
    add_note,
    current_run,
    next_note,
    recompute_around,
)
from disttensor.checks import argument_error, check_callable
from disttensor.comm.p2p import CHANNEL
from disttensor.graphs.local_program import compiled, reads_what_it_wrote
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.grad_slot import bucket_of
from disttensor.torch_private import (
    compiling,
    count_dispatch_modes,
    current_backward,
    storage_id,
)
from disttensor.trace.code_guard import CodeGuard
from disttensor.trace.code_watch import CodeWatch
from disttensor.trace.guarded_forward import ASSIGNS, ForwardCall, GuardedForward
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.record import Program
from disttensor.trace.replay import Replay, sources_of

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


def compile(target: F, *, backend: Any = "inductor", **options: Any) -> F:
    """Returns ``target``, a module or a function of DistTensors, whose local program is compiled
    by ``torch.compile`` from the second call of a kind on.

    A module is returned itself, with its own ``forward``. Forward and backward are one graph each,
    reshards included. A call that cannot be recorded runs eagerly, as under ``replay``, and
    ``why()`` of the forward (or of the function) returns the reasons. Of a module that cannot be
    recorded, the modules in it are compiled instead: the blocks of a model whose parameters are in
    sharded segments, the layers of pipeline stages, checkpointed blocks. ``breaks()`` returns the
    names of the calls at which graphs end, because they write to their arguments and communicate,
    or because Dynamo cannot trace them. All ranks must call ``compile`` alike.

    Args:
        target: a module, or a function of DistTensors.
        backend: of ``torch.compile``. "eager" and "aot_eager" give the bits of eager calls.
        options: others of ``torch.compile``, as ``mode``.

    Raises:
        TypeError: if the target or the backend is none of these.
        ValueError: if the module has a forward of its own, by ``replay`` or by other code.

    >>> model = dt.shard_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), mesh)
    >>> model = dt.compile(model, backend="eager")
    >>> for _ in range(3):
    ...     loss = model(dt.ones(2, 4, mesh=mesh)).sum()
    >>> model.forward.replays, model.forward.why(), model.forward.breaks()
    (2, [], [])
    """
    if not (isinstance(backend, str) or callable(backend)):
        raise argument_error("compile: backend", backend, "a name, as 'inductor', or a function")
    if not isinstance(target, nn.Module):
        check_callable("compile: target", target, "a module, or a function of DistTensors")
        return CompiledForward(target, backend, options)  # type: ignore[return-value]
    held = target.__dict__.get("forward")
    if held is not None and (isinstance(held, Replay) or not isinstance(held, InstanceForward)):
        raise ValueError(
            f"compile: the forward of this {type(target).__name__} was put on the instance, by "
            "replay, compile or other code; give a function that calls it: "
            "compile(lambda *args: module(*args))"
        )
    CompiledForward(target, backend, options).put()
    return target


@contextmanager
def _compiling_regions() -> Iterator[None]:
    """``compiling``, and so are the recomputations of the checkpointed regions that run inside."""
    key = object()
    callbacks.recompute_contexts()[key] = compiling
    try:
        with compiling():
            yield
    finally:
        del callbacks.recompute_contexts()[key]


class CompiledForward(Replay):
    """The forward of a module, or a function, whose recorded programs are compiled."""

    outcome: ClassVar[str] = "compile of {}: it is not one program"
    merges: ClassVar[bool] = (
        False  # a compiler does so, and looks for attention in lines as they are
    )

    def __init__(self, target: Any, backend: Any, options: dict[str, Any]) -> None:
        self.__setstate__({"module": target, "backend": backend, "options": options})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "backend": self.backend, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.backend, self.options = state["backend"], state["options"]
        self._breaks: dict[str, None] = {}

    def breaks(self) -> list[str]:
        """Returns the names of the calls at which a graph ends."""
        return list(dict.fromkeys(name for _, inside in self._inside() for name in inside._breaks))

    def why(self) -> list[str]:
        """Returns the reasons why calls ran the forward, as text. The reasons of a compiled module
        in this one begin with its name."""
        return [
            f"{name}: {reason}" if name else reason
            for name, inside in self._inside()
            for reason in GuardedForward.why(inside)
        ]

    def _inside(self) -> Iterator[tuple[str, CompiledForward]]:
        yield "", self
        for name, module in self.module.named_modules() if self.is_module else ():
            held = module.__dict__.get("forward")
            held = getattr(held, "inner", None) or held
            if isinstance(held, CompiledForward) and held is not self:
                yield name, held

    def new_guard(self, watch: CodeWatch | None = None) -> CodeGuard:
        guard = super().new_guard(watch)
        buckets = {bucket_of(t) for t in guard.tensors if isinstance(t, DistTensor)} - {None}
        if len(buckets) > 1 and not guard.why and self.is_module and any(_parts(self.module)):
            # All gradients of one program arrive at once.
            guard.why = "its gradients are reduced in segments, while the backward goes on"
        return guard

    def put(self) -> None:
        """Puts this in place of the class's forward, also of one that is recomputed."""
        held = self.module.__dict__.get("forward")
        if held is None:
            super().put()
        elif held.wraps and held.inner is None:  # a Skip stays: it computes nothing
            held.inner = self

    def must_run(self) -> bool:
        return super().must_run() or count_dispatch_modes() > 0  # torch compiles under none

    def trace(self, call: ForwardCall) -> tuple[Any, Program | str]:
        # A recomputation of a checkpointed region takes the way of the forward. A region around
        # this call has begun without the flag.
        with _compiling_regions() if current_run() is None else nullcontext():
            result, program = super().trace(call)
        if isinstance(program, str):
            return result, program
        if reads_what_it_wrote(program.lines):
            return result, "it reads a tensor anew after it has written to it"
        sources, _ = sources_of(call)
        if program.writes and self.key_of_memory(call.guard, call.inputs) is not None:
            return result, "it writes to tensors, two of which share memory"
        if any(sources[name].local.grad_fn is not None for name in program.written):
            return result, "it writes to a tensor of autograd's graph"
        if program.uses_written:  # AOTAutograd would compute again from the new value
            return result, "a backward needs a tensor from outside that it has written to"
        given = [str(getattr(x, "spec", f"a tensor of {list(x.shape)}")) for x in call.inputs]
        kind = f"{self.name()}, kind {len(self.recorded()) + 1} of its calls: {', '.join(given)}"
        run = compiled(program, self.backend, self.options, self._breaks, kind)
        return result, program._replace(run=run)

    def key_of_memory(self, guard: CodeGuard, inputs: Sequence[Any]) -> Any:
        """Returns which tensors share memory, or None: torch.compile relies on it."""
        memory = [storage_id(getattr(x, "local", x).untyped_storage()) for x in inputs]
        if len(set(memory)) == len(memory) and guard.memory.isdisjoint(memory):
            return None
        return tuple([(memory.index(m), m in guard.memory) for m in memory])

    def audit(self, program: Program, call: ForwardCall) -> tuple[Any, str]:
        with _compiling_regions():
            return super().audit(program, call)

    def may_audit(self) -> bool:
        # A recomputation takes the way of the forward. In a micro-batch, a schedule may split an
        # eager backward and add gradients in another order.
        return current_run() is None and not CHANNEL.get() and super().may_audit()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = current_run()  # of a checkpointed region
        if here is not None and current_backward() != -1:
            again = recompute_around(here)
            # A recomputation saves the tensors that its forward has saved.
            if again is None or next_note(here) is not self:
                return self.eager(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def run(self, program: Program, inputs: Sequence[Any]) -> Any:
        here = current_run()
        if here is not None:
            add_note(here, self)
        return super().run(program, inputs)

    def _report(self, why: str) -> None:
        is_new = why not in self._why
        super()._report(why)
        is_last = self._never or (is_new and why != ASSIGNS)
        for part in _parts(self.module) if why and is_last and self.is_module else ():
            if isinstance(part.__dict__.get("forward"), InstanceForward | None):
                CompiledForward(part, self.backend, self.options).put()


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in ``module`` that are compiled if it is not one program: blocks, segments
    of sharded state, layers of stages. A single layer is not faster compiled."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # ModuleList: it only holds others
            yield from _parts(child)
        elif any(True for _ in child.children()):
            yield child
