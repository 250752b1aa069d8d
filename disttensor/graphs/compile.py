"""``compile``: gives the recorded program of a module or a function to ``torch.compile``.

A recorded program (``replay``) has three parts. It reads the locals of its sources, calls functions
of locals, and makes DistTensors of the results. The calls are plain PyTorch but for reshards, which
become an ordinary autograd function around an operator that Dynamo and AOTAutograd trace, and for
local functions that communicate or draw, which are one operator each (``opaque_call``).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from disttensor.autograd import functional, grad_types
from disttensor.autograd.grad_types import GradTransition
from disttensor.checks import argument_error, check_callable
from disttensor.comm import collectives
from disttensor.errors import name_of
from disttensor.graphs.opaque_call import OPERATORS, opaque
from disttensor.graphs.traced_comm import (
    REFUSED,
    in_mode,
    number_of,
    register,
    traced_gather,
    traced_reshard,
    traced_sum,
)
from disttensor.torch_private import compiling, is_untraceable
from disttensor.trace.guarded_forward import ForwardCall
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.record import Program, _in_mode, ambient
from disttensor.trace.replay import Replay
from disttensor.trace.tape import LineCall, LineKind, call_text, define, tensors_in, variables
from reshard import cross_mesh

Tensor = torch.Tensor
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_LINE = re.compile(r'"<replay>", line (\d+), in local')
_OURS = {"disttensor", "ops", "reshard"}
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def compile(target: F, *, backend: Any = "inductor", **options: Any) -> F:
    """Returns ``target``, a module or a function of DistTensors, whose local program is compiled
    by ``torch.compile`` from the second call of a kind on.

    A module is returned itself, with its own ``forward``. Forward and backward are one graph each,
    reshards included. A call that cannot be recorded runs eagerly, as under ``replay``, and
    ``why()`` of the forward (or of the function) returns the reasons; ``breaks()`` returns the
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
    if held is None:  # a Skip stays: it computes nothing
        CompiledForward(target, backend, options).put()
    return target


class CompiledForward(Replay):
    """The forward of a module, or a function, whose recorded programs are compiled."""

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
        return list(self._breaks)

    def trace(self, call: ForwardCall) -> tuple[Any, Program | str]:
        with compiling():
            result, program = super().trace(call)
        if isinstance(program, str):
            return result, program
        if program.written or any(line.kind is LineKind.WRITE for line in program.lines):
            return result, "it writes to tensors, which a compiled program does not"
        if ambient("cpu").region is not None:
            return result, "it is inside of a checkpointed region"
        return result, program._replace(run=self.compiled(program))

    def compare(self, program: Program, call: ForwardCall) -> Any:
        return self.run(program, call.inputs)  # its numbers are the compiler's

    def compiled(self, program: Program) -> Function:
        """Returns the program with its calls as one compiled function."""
        register(OPERATORS)
        scope = dict(program.run.__globals__)
        reads = [line.text for line in program.lines if line.kind is LineKind.READ]
        calls = [line for line in program.lines if line.kind is LineKind.CALL]
        makes = [line.text for line in program.lines if line.kind is LineKind.MAKE]
        made = {name for line in calls for name in line.makes}
        given = sorted({v for line in calls for v in tensors_in(line.text)} - made)
        needed = sorted({v for text in [*makes, program.result] for v in variables(text)} & made)
        breaks = len(self._breaks)
        body = [self._lowered(line.call, scope) for line in calls if line.call is not None]
        results = "".join(f"{name}, " for name in needed)
        local = define("local", _function("local", given, body, f"({results})"), dict(scope))
        whole = len(self._breaks) == breaks and not self._breaks
        names = [_named(line.call.func) for line in calls if line.call is not None]
        scope["local"] = self._graph(local, names, scope) if whole else self._compile(local)
        call = f"({results}) = local({', '.join(given)})" if needed else "pass"
        lines = [*reads, call, *makes]
        text = _function("program", program.parameters, lines, program.result)
        return define("program", text, scope)

    def _compile(self, local: Function, **options: Any) -> Function:
        options |= self.options
        return torch.compile(local, backend=self.backend, dynamic=False, **options)

    def _graph(self, local: Function, names: list[str], scope: dict[str, Any]) -> Function:
        """Returns ``local``, which calls the functions ``names``, as one graph if Dynamo can trace
        all of them. The first call decides, and puts the compiled function into ``scope``."""
        graph = self._compile(local, fullgraph=True)

        def first(*locals: Tensor) -> Any:
            scope["local"] = graph
            try:
                return graph(*locals)
            except RuntimeError as error:
                if not is_untraceable(error):
                    raise
                line = _LINE.search(str(error))
                self._breaks[names[int(line[1]) - 2] if line else str(error).split("\n")[0]] = None
                scope["local"] = self._compile(local)
                return scope["local"](*locals)

        return first

    def _lowered(self, call: LineCall, scope: dict[str, Any]) -> str:
        """Returns the text of a call that torch.compile can trace, or that breaks the graph."""
        func, constants = _traceable(call.func, call.args)
        if constants is not None:
            call = call._replace(words=(call.words[0], *map(repr, constants)))
        elif not _is_traced(func, call.args):
            if not call.writes and func is not cross_mesh._run:
                return opaque(call._replace(func=func), scope)
            self._breaks[_named(func)] = None
            func = torch.compiler.disable(func)
        elif func is _in_mode:
            func = in_mode
        name = f"f{len(scope)}"
        scope[name] = func
        return call_text(call, name)


def _traceable(func: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...] | None]:
    """Returns the form of a function that communicates which torch.compile traces, and its
    arguments after the tensor; the function itself, and None, for all others."""
    func = getattr(func, "plain", func)
    if func is grad_types._apply_transition:
        return traced_reshard, _transition(args[1])
    if func is cross_mesh._run and args[1].mesh is args[2].mesh:
        return traced_reshard, _transition(grad_types.transition_between(args[1], (), args[2], ()))
    if func in (functional.psum, functional.pvary) and args[1] is not None:
        return traced_sum, (number_of(args[1]), func is functional.psum)
    if func is functional.all_gather and args[1] is not None:
        return traced_gather, (number_of(args[1]), args[1].index)
    if func is Tensor.unflatten:  # calls super(), which Dynamo does not trace
        return torch.unflatten, None
    if func is collectives.all_reduce:
        return torch.ops.disttensor.all_reduce, (args[1], number_of(args[2]))
    return func, None


def _transition(transition: GradTransition) -> tuple[Any, ...]:
    partial = (*transition.src.spec.layout.partial, *transition.dst.spec.layout.partial)
    if any(op not in ("sum", "avg") for _, op in partial):  # has no gradient
        return number_of(transition), REFUSED, 1.0
    back, scale = transition.backward()
    return number_of(transition), number_of(back), scale


def _named(func: Function) -> str:
    """Returns the name of a function; of a local function, the module and the function of its
    rule; of ``apply``, the autograd function."""
    if isinstance(owner := getattr(func, "__self__", None), type):
        return f"{owner.__module__}.{owner.__qualname__}"
    outer, inside, _ = str(getattr(func, "__qualname__", "")).partition(".<locals>")
    return f"{func.__module__}.{outer}" if inside else name_of(func)


def _is_traced(func: Function, args: tuple[Any, ...]) -> bool:
    """Returns True for functions of torch, for functions of ours that do nothing but call them, and
    for autograd functions of users."""
    if func is _in_mode:
        return _is_traced(args[1], args[2:])
    if func in (functional.psum, functional.pvary, functional.all_gather):
        return args[1] is None
    owner = getattr(func, "__self__", None)
    if isinstance(func, _BUILTIN):
        return True
    if isinstance(owner, type):
        return owner.__module__.partition(".")[0] not in _OURS
    return str(getattr(func, "__module__", "")).partition(".")[0] == "torch"


def _function(name: str, parameters: Sequence[str], lines: Sequence[str], result: str) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {name}({', '.join(parameters)}):\n{body}    return {result}\n"
