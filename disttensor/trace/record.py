"""Recording: one ordinary run of a forward that writes every call on locals to a tape.

The run goes through the dispatcher as usual. A CallRecorder observes it (``disttensor.observe``),
and its function mode sees the calls of regular tensors. One line of the tape is

    the local function of a plan, a reshard of a local         whatever they do inside
    a function of regular tensors, of the user or ours         seen by the function mode
    a custom autograd function of regular tensors
    ``local_for`` and ``mark_written`` of a source             an argument, a parameter, ...

A tensor that none of these made, and that is no source, ends the recording. So does everything that
a replay would miss: values read by Python, messages, hooks, other modes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, MethodWrapperType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from disttensor.autograd import activation_checkpoint
from disttensor.comm.compare_programs import CallSignature
from disttensor.dispatch import dispatch, fallback, writes
from disttensor.dispatch.call_plan import PythonCall
from disttensor.errors import is_users, name_of
from disttensor.observe import Observer
from disttensor.progress import Advance, bar
from disttensor.pytree import CONSTANTS, collect
from disttensor.random import counter
from disttensor.settings import Snapshot, snapshot
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import (
    next_number,
    no_function_mode,
    no_torch_function,
    node_number,
    storage_id,
)
from disttensor.trace.expression import Apply, Attribute, SourceName
from disttensor.trace.results import Results
from disttensor.trace.tape import Line, LineKind, Tape
from disttensor.trace.torch_functions import (
    ASSIGNMENT,
    NOT_IF_UNUSED,
    QUESTION,
    REFUSED,
    body,
    by_spec,
    kind_of,
    permuted,
    reads_sizes,
    shape_is_read,
    unneeded_cast,
)
from disttensor.trace.world_state import Untraceable, WorldState, world_state
from ops.answer import is_dynamic, named_dynamic

Tensor = torch.Tensor
Function = Callable[..., Any]


class Program(NamedTuple):
    """A recorded forward.

    run         ``run(*inputs)`` runs it.
    text        its source; ``parameters``, ``lines`` and ``result`` are the same as data.
    calls       are compared with other ranks.
    written     names of the sources that it writes to.
    scope       the constants by name.
    writes      it writes to memory from outside.
    uses_written
                a backward reads such memory after the write.
    """

    run: Function
    text: str
    calls: tuple[CallSignature, ...]
    written: tuple[str, ...]
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]
    result: Any
    scope: dict[str, Any]
    writes: bool
    uses_written: bool


_CUSTOM = "it calls a custom autograd.Function, which gathers its DistTensors"


class Ambient(NamedTuple):
    """State outside of a call on which its result may depend."""

    settings: Snapshot
    region: Any
    run: Any


def ambient(device: str) -> Ambient:
    run = activation_checkpoint.current_run()
    return Ambient(snapshot(device), activation_checkpoint.region(), run)


def record(
    forward: Callable[[], Any],
    sources: dict[str, Tensor],
    parameters: list[str],
    device: str,
    merge: bool,
) -> tuple[Any, Program | str]:
    """Returns the result of ``forward()``, and its Program or the reason why it has none.

    ``sources``: name -> tensor; ``parameters``: the names of sources that are given in each call;
    ``merge``: see ``Tape.live_lines``.
    """
    with bar("recording", unit="calls") as advance:
        recorder = CallRecorder(sources, parameters, device, advance)
        before = world_state()
        with recorder, recorder.mode:
            result = forward()
    try:
        return result, recorder.program(result, before, merge)
    except Untraceable as why:
        return result, str(why)


def in_mode(grad: bool, func: Function, /, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(grad):
        return func(*args, **kwargs)


class _RegularCalls(TorchFunctionMode):
    """Passes the calls of functions of torch to a CallRecorder."""

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.call(func, types, args, kwargs or {})


class CallRecorder(Observer):
    """The observer that writes a Tape. ``why``: the first reason why there is no program."""

    sees_calls = True

    def __init__(
        self, sources: dict[str, Tensor], parameters: list[str], device: str, advance: Advance
    ) -> None:
        self.mode, self.advance = _RegularCalls(self), advance
        self.tape = Tape(sources)
        self.sources, self.parameters, self.device = sources, parameters, device
        for name, x in sources.items():
            if name not in parameters:
                self.tape.scope[name] = x
        self.why = ""
        self.quiet = 0  # greater than 0 inside a call that is already one line
        self.within = 0  # number of calls of DistTensors around this one
        self.writes = False
        self.line_writes = False  # the last line has written to its arguments
        self.opening = False  # inside a local function whose calls become lines
        self.calls: list[CallSignature] = []
        self.written: dict[str, None] = {}
        self.ambient, self.grad = ambient(device), torch.is_grad_enabled()
        self.generator = _generator(device)
        self.draws = 0  # random calls made inside of lines
        self.comms = 0  # collectives so far
        self.sent = 0  # collectives run inside of lines
        self.first_node = 0  # of the last line
        self.memory = {_memory(getattr(x, "local", x)) for x in sources.values()}
        self.written_memory: set[int] = set()  # a part of it
        self.uses_written = False
        self.states = {
            name: (x.local, x.spec) for name, x in sources.items() if isinstance(x, MeshTensor)
        }
        for x in sources.values():
            if type(x) is DistTensor and views.shares_memory(x):
                self.refuse("an argument shares memory in a way that is looked at in each call")

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    # Recorded calls -------------------------------------------------------------------------------

    def call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs and records a function of torch."""
        if self.quiet:
            return func(*args, **kwargs)
        self.advance()
        if DistTensor in types:
            if named_dynamic(func, args) and is_dynamic(func, args, kwargs):
                self.refuse(f"{name_of(func)}: the shape of its result depends on data")
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # changes a wrapper below its class
                with no_torch_function():
                    return func(*args, **kwargs)
            self.within += 1
            try:
                with self.mode:
                    out = dispatch.dispatch(DistTensor, func, types, args, kwargs)
            finally:
                self.within -= 1
        else:
            out = self.plain(func, args, kwargs)
        # a frame above: the mode, and above that the caller of the function
        if not (self.within or self.opening) and is_users(sys._getframe(2)) and _is_object(out):
            self.refuse(f"{name_of(func)} returns an object, which may change")
        return out

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs and records a function of regular tensors."""
        kind = kind_of(func)
        if kind == QUESTION:
            if self.opening and not by_spec(func):
                self.refuse(
                    f"a local function calls {name_of(func)}, whose result depends on memory"
                )
            return func(*args, **kwargs)
        if kind in (REFUSED, ASSIGNMENT):
            self.refuse(f"it calls {name_of(func)}")
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            self.refuse("it draws from a torch.Generator, which it may seed in each call")
        inner = None if self.why else body(func)
        if inner is not None:
            with self.mode:  # records the calls of the body
                return self.run_body(inner, args, kwargs, func)
        tensors = collect((args, kwargs), [])
        asks = reads_sizes(func, tensors)
        with self.line(args, kwargs), asks or nullcontext():
            out = func(*args, **kwargs)
        if unneeded_cast(func, args, kwargs, out):
            return out
        writes = fallback.writes(func)
        if not collect(out, []):
            if not tensors:
                return out  # torch.device(...) and the like
            if out is not None or not writes:
                self.refuse(f"{name_of(func)} reads a value")
        if shape_is_read(func, args, kwargs) or (asks is not None and asks.found):
            self.refuse(f"{name_of(func)}: the shape of its result may depend on data")
        self.writes = self.writes or writes
        self.note(func, args, kwargs, out, kind == NOT_IF_UNUSED)
        return out

    def note(self, func: Function, args: Any, kwargs: Any, out: Any, if_used: bool = False) -> None:
        if self.why:
            return
        self.note_memory(args, kwargs, out)
        now, grad = ambient(self.device), torch.is_grad_enabled()
        try:
            same_grad = now.settings._replace(grad=self.grad)
            if now._replace(settings=same_grad) != self.ambient:
                raise Untraceable(
                    "it changes autocast, inference mode, checkpointing or a setting inside"
                )
            if grad is not self.grad and self.opening:
                raise Untraceable(
                    "a local function changes the grad mode, as a custom autograd.Function does"
                )
            order = permuted(func, args, kwargs) or ()
            if grad is not self.grad:
                func, args, order = in_mode, (grad, func, *args), ()
            self.tape.add_call(func, args, kwargs, out, if_used, order, self.line_writes)
        except Untraceable as why:
            self.refuse(str(why))

    def note_memory(self, args: Any, kwargs: Any, out: Any) -> None:
        """Notes a write to memory from outside, and a later use of the written memory."""
        used = {_memory(t) for t in collect((args, kwargs), [])} & self.memory
        if used & self.written_memory:
            saved = _saved_since(self.first_node, collect(out, []))
            self.uses_written |= any(_memory(t) in self.written_memory for t in saved)
        if self.line_writes:
            self.written_memory |= used

    def run_step(self, step: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``step`` and records it as one line."""
        if self.quiet:
            return step(*args, **kwargs)
        with self.line(args, kwargs), self.inside():
            out = step(*args, **kwargs)
        self.note(step, args, kwargs, out)
        return out

    def run_local(self, local: Function, /, *args: Any, **kwargs: Any) -> Any:
        # Of ``own_memory`` (ops/shape/strides.py): chooses by strides, which are in the key.
        decided = getattr(local, "decided", None)
        if decided is not None and not self.quiet:
            with self.inside():
                local = decided(args[0])
        return self.run_body(local, args, kwargs, local)

    def run_body(self, body: Function, args: Any, kwargs: Any, name: Function) -> Any:
        """Runs ``body``, a local function or the body of the function ``name``, and records one
        line for each call that it makes. It becomes one line, a call of ``name``, if it draws,
        communicates, or reads a value that may differ between calls."""
        if self.quiet or self.why:
            return self.run_step(name, *args, **kwargs)
        before = self.tape.position(), self.writes, self.draws, self.sent, self.opening
        draws, sent, self.opening = counter._State.calls, self.comms, True
        unseen = self.comms - self.sent
        with self.line(args, kwargs):
            out = body(*args, **kwargs)
        made = all(self.tape.has_variable(t) for t in collect(out, []))
        same = counter._State.calls == draws and self.comms - self.sent == unseen
        if not self.why and made and same:
            self.opening = before[-1]
            return out
        self.why = ""
        position, self.writes, self.draws, self.sent, self.opening = before
        self.tape.rewind(position)
        if not self.quiet:
            self.draws += counter._State.calls - draws
            self.sent += self.comms - sent
        self.note(name, args, kwargs, out)
        return out

    @contextmanager
    def line(self, *arguments: Any) -> Iterator[None]:
        """Surrounds a line: the generator of torch must not be seeded between lines."""
        self.same_generator()
        before, self.first_node = _versions(arguments), next_number()
        yield
        self.line_writes = _versions(arguments) != before
        self.follow_generator()

    def same_generator(self) -> None:
        if self.generator != _generator(self.device):
            self.refuse("it seeds torch's generator, or draws in a way that is not seen")

    def follow_generator(self) -> None:
        self.generator = _generator(self.device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        draws, sent = counter._State.calls, self.comms
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1
            if not self.quiet:
                self.draws += counter._State.calls - draws
                self.sent += self.comms - sent

    # Events of the engine -------------------------------------------------------------------------

    def begin_call(self, planned: Any) -> None:
        if planned.call is not None and planned.call.mesh is not None:
            self.calls.append(planned.call)
        if type(planned) is PythonCall and not (self.quiet or self.within):
            self.refuse(_CUSTOM)

    def communicate(self, record: Any) -> None:
        self.comms += 1

    def exchange_objects(self) -> None:
        self.refuse("it exchanges sizes between ranks (give out_shapes to local_map)")

    def seed(self) -> None:
        self.follow_generator()  # if the call draws, the count of random calls changes

    def read_local(self, read: Function, /, x: Any, axes: Any) -> Any:
        """Records uses of sources: a replay reads them again, as they collect gradients."""
        source = self.source_of(x)
        if source is None:
            return read(x, axes)
        with self.inside():
            out = read(x, axes)
        if out is not x.local:
            self.use(source, axes, out)
        return out

    def write(self, x: DistTensor, tracked: bool) -> None:
        if self.quiet:
            return
        if not tracked:
            self.refuse("it writes in a way that autograd does not count")
        if x._view_state is not None or views.has_copies(x.local):
            self.refuse("it writes to a copy in place of a view of another tensor")
        self.wrote(x)

    def source_of(self, x: Any) -> SourceName | None:
        """Returns the name of ``x`` if it is a source and its use becomes a line."""
        return None if self.quiet else self.tape.source_of(x)

    def use(self, source: SourceName, axes: Any, alias: Tensor) -> None:
        """Records that ``alias`` is the local of a source for uses that vary over ``axes``."""
        if self.tape.has_variable(alias):
            return
        name = self.tape.bind(alias)
        read, grad = Attribute(source, "local_for"), torch.is_grad_enabled()
        call = Apply(read, (axes,))
        if grad is not self.grad:
            call = self.tape.apply(in_mode, grad, read, axes)
        self.tape.add_line(LineKind.READ, name, call)

    def wrote(self, x: DistTensor) -> None:
        """Records a call ``mark_written(x)``."""
        self.writes = True
        source = self.tape.source_of(x)
        if self.why:
            return
        if source is not None:
            self.written[source] = None
            call = self.tape.apply(writes.mark_written, source)
        else:
            if _memory(x.local) not in self.memory:
                return  # no tensor from outside has this memory
            call = self.tape.apply(views.invalidate, self.tape.variable_of(x.local))
        self.tape.add_line(LineKind.WRITE, None, call)

    # The recorded program -------------------------------------------------------------------------

    def program(self, result: Any, before: WorldState, merge: bool) -> Program:
        """Returns the Program. Raises Untraceable if the forward cannot be replayed."""
        self.same_generator()
        drew = before.draws_until(world_state()) != self.draws
        if drew and self.why != _CUSTOM:  # which draws for its backward
            raise Untraceable("it draws random numbers outside of functions of torch")
        if self.why:
            raise Untraceable(self.why)
        if self.comms != self.sent:
            raise Untraceable("it communicates outside of functions of torch and reshards")
        for name, (local, spec) in self.states.items():
            x: Any = self.sources[name]
            if x.local is not local or x.spec is not spec:
                raise Untraceable("it changes the shape or the memory of a tensor from outside")
        made = Results(self.tape, self.writes).expression(result)
        lines = tuple(self.tape.live_lines(made, merge))
        run, text = self.tape.build_function(self.parameters, lines, made)
        written = tuple(self.written)
        parts = tuple(self.parameters), lines, made, self.tape.scope
        memory = bool(self.written_memory), self.uses_written
        return Program(run, text, tuple(self.calls), written, *parts, *memory)


def _saved_since(number: int, results: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that the nodes of ``results`` have saved, of nodes from a number on."""
    saved: list[Any] = []
    queue = [t.grad_fn for t in results if t.grad_fn is not None]
    while queue:
        node: Any = queue.pop()
        if node_number(node) >= number:
            saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            saved += getattr(node, "saved_tensors", ())
            queue += [n for n, _ in node.next_functions if n is not None]
    return collect(saved, [])


def _memory(t: Tensor) -> int:
    with no_function_mode():
        return storage_id(t.untyped_storage())


def _is_object(value: Any) -> bool:
    """Returns True for an answer that holds more than tensors and constants."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_object, value))
    known = isinstance(value, (Tensor, BuiltinFunctionType, MethodWrapperType))
    return not (known or type(value) in CONSTANTS)


def _versions(arguments: Any) -> list[float]:
    """Returns the versions of the tensors. Inference tensors have none: they may have changed."""
    with no_function_mode():
        tensors = collect(arguments, [])
        return [math.nan if t.is_inference() else t._version for t in tensors]


def _generator(device: str) -> bytes:
    """Returns the state of torch's generators."""
    counter.get_state()  # takes notice of a new seed, which changes the state of its generator
    states = [torch.default_generator.get_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    with no_function_mode():
        return b"".join([s.numpy().tobytes() for s in states])
