"""GuardedForward: a forward that runs once for each kind of call, and then a program in its place.

The key of a call contains everything that its result may depend on: specs, ``requires_grad`` and
identity of tensors, constants among the arguments, training flags, the settings of torch and of
this package. Everything else that the forward reads is guarded (``CodeGuard``): if it changes, all
programs are dropped. Specs and settings are the same on all ranks, so all ranks decide alike.

Guards may have gaps. So in the 4th, 8th, 16th, ... run of a program the forward itself runs, is
recorded again and compared with the program (the *audit*); a difference is an error. So it is in
the 1st run, if the recording has shown code that the guard did not know, and under
``dt.debugging.compare_ranks``.

``skip.Skip`` runs programs off the mesh, which compute nothing. ``replay.Replay`` runs the recorded
local calls.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from disttensor.cache import Cache
from disttensor.comm import compare_collectives
from disttensor.pytree import Uncacheable, find_tensors, key_of_contents
from disttensor.settings import snapshot
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.user_facts import user_attributes
from disttensor.torch_private import count_dispatch_modes, current_backward
from disttensor.trace.code_guard import CodeGuard
from disttensor.trace.code_watch import CodeWatch
from disttensor.trace.instance_forward import InstanceForward

Tensor = torch.Tensor
ASSIGNS = "it assigns to attributes"
_CHANGES = "it changes what it reads"
_OWN = "an argument is one of its own tensors"
_DIFFERS = (
    "replay of {}: the forward does not make the calls that were recorded any more: {}. It depends "
    "on something that has changed and that is not compared in each call (docs/replay.md, 'What is "
    "assumed'): make this an argument or an attribute, or run the forward without replay"
)
_MOST = 64  # most kinds of calls that are kept
_TRIALS = 16  # first runs allowed in addition to one for each run of a program
_logger = logging.getLogger("disttensor.replay")


class ForwardCall(NamedTuple):
    """A call: its guard, the tensors among its arguments (each once), and ``forward()``, which runs
    it call by call."""

    guard: CodeGuard
    inputs: Sequence[Any]
    forward: Callable[[], Any]


class _Entry:
    """A program, the number of its runs, and the number of the run in which it is compared."""

    __slots__ = ("audit", "program", "runs")

    def __init__(self, program: Any, audit: int) -> None:
        self.program, self.runs, self.audit = program, 0, audit


class GuardedForward(InstanceForward):
    """The forward of a module, or a function, and its programs. Copies and pickles of the module
    contain it without the programs. ``replays``: the number of calls that ran a program."""

    logs: ClassVar[bool] = True  # are the reasons logged?
    outcome: ClassVar[str] = "replay of {}: calls run one by one"  # when there is no program
    # first calls that may assign to attributes: they may fill caches of later ones
    most_assignments: ClassVar[int] = 2

    def __init__(self, target: Any) -> None:
        self.__setstate__({"module": target})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: Any = state["module"]
        self.is_module = isinstance(self.module, nn.Module)
        self.eager = self.class_forward if self.is_module else self.module
        # key -> the _Entry of the program, or the reason for having none
        self._programs: Cache[Any, Any] = Cache(_MOST)
        self._guard: CodeGuard | None = None
        self._assigned = self._trials = self.replays = 0
        self._why: dict[str, None] = {}
        self._changes: dict[str, None] = {}
        self._never = False

    @property
    def __signature__(self) -> inspect.Signature:
        return super().__signature__ if self.is_module else inspect.signature(self.module)

    def why(self) -> list[str]:
        """Returns the reasons why calls ran the forward, as text."""
        return list(self._why)

    def changes(self) -> list[str]:
        """Returns what has changed between calls, so that the forward was recorded anew."""
        return list(self._changes)

    def recorded(self) -> list[Any]:
        """Returns the programs."""
        return [e.program for e in self._programs.values() if type(e) is _Entry]

    # For subclasses ------------------------------------------------------------------------------

    def new_guard(self, watch: CodeWatch | None = None) -> CodeGuard:
        """Returns the guard of everything that the forward reads, which ``watch`` has seen run; the
        present one, if that knows all code. ``why`` of it: see CodeGuard."""
        known = self._guard
        if watch is not None and known is not None:
            return known.including(watch)
        return CodeGuard(self.module, known.reach.ran if known is not None else None)

    def must_run(self) -> bool:
        """Returns True if the state of this thread requires the forward itself."""
        raise NotImplementedError

    def key_of_tensor(self, x: Tensor) -> Any:
        """Returns the key of a tensor argument. Raises Uncacheable if calls with it have none."""
        raise NotImplementedError

    def key_of_own(self, guard: CodeGuard) -> Any:
        """Returns the key of the tensors that the forward reads and that are no arguments."""
        return guard.state()

    def key_of_memory(self, guard: CodeGuard, inputs: Sequence[Any]) -> Any:
        """Returns a key of the memory that tensors share, if a program depends on it."""
        return None

    def attributes_as_inputs(self, guard: CodeGuard) -> Sequence[Any]:
        """Returns attributes of the module that its program takes as inputs."""
        return ()

    def unfit(self, call: ForwardCall) -> str:
        """Returns the reason why calls of this kind have no program, or ""."""
        raise NotImplementedError

    def trace(self, call: ForwardCall) -> tuple[Any, Any]:
        """Runs the forward. Returns its result, and the program or the reason for having none."""
        raise NotImplementedError

    def run(self, program: Any, inputs: Sequence[Any]) -> Any:
        """Runs a program, and returns the result of the call."""
        raise NotImplementedError

    def audit(self, program: Any, call: ForwardCall) -> tuple[Any, str]:
        """Runs the forward. Returns its result, and how it differs from the program, or ""."""
        raise NotImplementedError

    def may_audit(self) -> bool:
        """Returns True if the forward may run in place of a program: not in a captured step."""
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return not captured and count_dispatch_modes() == 0

    # Calls ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._never or self.must_run():
            return self.eager(*args, **kwargs)
        guard = self._guard
        if guard is None or (change := guard.change()):
            guard = self._renew_guard("" if guard is None else f"{change} has changed")
        if guard is None or guard.why:
            return self.eager(*args, **kwargs)
        try:
            key, inputs = self._key(guard, args, kwargs)
        except Uncacheable as error:
            self._report(str(error))
            return self.eager(*args, **kwargs)
        entry = self._programs.get(key)
        if type(entry) is str:
            return self.eager(*args, **kwargs)
        if entry is None:
            return self.first_call(key, inputs, args, kwargs)
        self.replays += 1
        entry.runs += 1
        due = entry.runs >= entry.audit or (entry.runs == 1 and compare_collectives.enabled)
        if due and current_backward() == -1 and self.may_audit():
            entry.audit = max(4, 2 * entry.runs)
            result, why = self.audit(entry.program, self._call(guard, inputs, args, kwargs))
            if why:
                self._programs.clear()
                raise RuntimeError(_DIFFERS.format(self.name(), why))
            return result
        return self.run(entry.program, inputs)

    def _call(self, guard: CodeGuard, inputs: Any, args: Any, kwargs: Any) -> ForwardCall:
        return ForwardCall(guard, inputs, partial(self.eager, *args, **kwargs))

    def first_call(self, key: Any, inputs: Any, args: Any, kwargs: Any) -> Any:
        """Runs the first call of a key, and keeps its program."""
        guard = self._guard
        assert guard is not None
        call = self._call(guard, inputs, args, kwargs)
        if current_backward() != -1:  # a recomputation does not show all effects of a forward
            return call.forward()
        why = self.unfit(call)
        if why or not self._may_try():
            self._programs[key] = why
            self._report(why)
            return call.forward()
        marks, given = guard.marks(), _contents((args, kwargs))
        watch = CodeWatch()
        forward = partial(_watched, watch, call.forward)
        result, program = self.trace(call._replace(forward=forward))
        own = self.key_of_own(guard), guard.flags()
        if guard.marks() != marks:
            program = ASSIGNS
            self._assigned += 1
            self._never = self._assigned > self.most_assignments
        elif change := guard.change():
            program = f"{_CHANGES}: {change}"
        elif _contents((args, kwargs)) != given:
            program = "it changes lists or dicts among its arguments"
        elif type(program) is not str:
            why = _shared(result, guard, (args, kwargs)) or _noted(result, guard, inputs)
            program = watch.why or why or program
        if type(program) is str:
            self._report(program)
            if not program or program == ASSIGNS:
                return result
        wider = self.new_guard(watch)
        if wider is guard or wider.why:
            self._keep(key, wider.why or program, 4)
            self._report(wider.why)
        elif own == key[-3:-1]:
            self._widen(wider, key, inputs, program)
        return result

    def _widen(self, guard: CodeGuard, key: Any, inputs: Any, program: Any) -> None:
        """Replaces the guard by one that knows more code, and keeps the program under it."""
        known, self._guard = self._guard, guard
        self._programs.clear()
        if any(id(x) in guard.ids for x in inputs):
            self._report(program := _OWN)
        elif type(program) is str and known is not None and guard.ids > known.ids:
            return  # the next recording begins with all tensors
        elif type(program) is str and program.startswith(_CHANGES):
            return  # a first call may fill a cache
        key = (*key[:-3], self.key_of_own(guard), guard.flags(), key[-1])
        self._keep(key, program, 1)

    def _keep(self, key: Any, program: Any, audit: int) -> None:
        self._programs[key] = program if type(program) is str else _Entry(program, audit)

    def _renew_guard(self, change: str) -> CodeGuard | None:
        """Guards the forward again. Returns None to stop trying."""
        if change:
            self._changes[change] = None
        if not self._may_try():
            return None
        self._programs.clear()
        self._guard = self.new_guard()
        self._report(self._guard.why)
        return self._guard

    def _may_try(self) -> bool:
        self._trials += 1
        if self._trials > _TRIALS + self.replays:
            self._never = True
            changes = f" ({', '.join(self._changes)})" if self._changes else ""
            self._report(f"it changes too often{changes}")
        return not self._never

    def _report(self, why: str) -> None:
        if why and why not in self._why:
            self._why[why] = None
            if self.logs:
                _logger.warning("%s: %s", self.outcome.format(self.name()), why)

    def name(self) -> str:
        found = type(self.module) if self.is_module else self.module
        return getattr(found, "__qualname__", repr(found))

    # Keys -----------------------------------------------------------------------------------------

    def _key(self, guard: CodeGuard, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Returns the key of a call, and the tensors among the arguments, each once."""
        inputs: list[Any] = []
        parts: list[Any] = [len(args)]

        def key(x: Tensor) -> Any:
            inputs.append(x)
            return self.key_of_tensor(x)

        for x in args:
            if type(x) is DistTensor:  # mostly
                inputs.append(x)
                parts.append(self.key_of_tensor(x))
            else:
                parts.append(key_of_contents(x, key))
        if kwargs:
            parts.append(key_of_contents(kwargs, key))
        for x in inputs:
            if id(x) in guard.ids:
                raise Uncacheable(_OWN)
            if x.__dict__ and user_attributes(x):
                raise Uncacheable("an argument has attributes that the user has set")
        for x in self.attributes_as_inputs(guard):
            parts.append(key_of_contents(x, key))
        if len(inputs) > 1:
            ids = [id(x) for x in inputs]
            if len(set(ids)) < len(ids):
                parts.append(tuple([ids.index(i) for i in ids]))
                inputs = [x for i, x in enumerate(inputs) if ids.index(id(x)) == i]
        parts.append(self.key_of_memory(guard, inputs))
        # The last three; ``first_call`` compares the first two of them, ``_widen`` replaces these.
        parts += (self.key_of_own(guard), guard.flags(), snapshot(device_of(inputs)))
        return tuple(parts), inputs


def device_of(inputs: Sequence[Any]) -> str:
    return str(inputs[0].device.type) if inputs else "cpu"


def _contents(value: Any) -> Any:
    """Returns the contents of lists, tuples and dicts, by identity."""
    if type(value) is list or type(value) is tuple:
        return [_contents(v) for v in value]
    if type(value) is dict:
        return [*value, *map(_contents, value.values())]
    return id(value)


def _watched(watch: CodeWatch, forward: Callable[[], Any]) -> Any:
    with watch:
        return forward()


def _shared(result: Any, guard: CodeGuard, given: Any) -> str:
    """Returns the reason for not recording a forward that returns a list or a dict that exists."""
    known = {id(v) for v in _containers(given)}
    if any(id(v) in known or guard.owns(v) for v in _containers(result)):
        return "it returns a list or a dict that it has read"
    return ""


def _noted(result: Any, guard: CodeGuard, inputs: Sequence[Any]) -> str:
    """Returns the reason for not recording a forward that sets attributes of tensors."""
    tensors = (*inputs, *(t for t in find_tensors(result) if id(t) not in guard.ids))
    return "it sets attributes of its arguments or results" * any(map(user_attributes, tensors))


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)
