"""A recorded program with its calls as one function that ``torch.compile`` compiles.

Calls of torch and of traceable communication are given as they are. Other local functions that
communicate or draw are one operator each (``opaque_call``). Programs with the same calls, as of the
blocks of a model, share one compiled function: their tensors are its arguments.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.autograd import functional, grad_types
from disttensor.autograd.grad_types import GradTransition
from disttensor.cache import Cache
from disttensor.comm import collectives
from disttensor.errors import name_of
from disttensor.graphs.late_waits import with_late_waits
from disttensor.graphs.opaque_call import OPERATORS, identities, opaque, traced_call
from disttensor.graphs.traced_comm import (
    REFUSED,
    number_of,
    register,
    traced_gather,
    traced_reshard,
    traced_sum,
    way_of,
)
from disttensor.progress import say
from disttensor.settings import snapshot
from disttensor.torch_private import is_untraceable, keep_versions, mark_parameter
from disttensor.trace.record import Program, in_mode
from disttensor.trace.tape import Line, LineCall, LineKind, call_text, define, tensors_in, variables
from reshard import cross_mesh

Tensor = torch.Tensor
Function = Callable[..., Any]

_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OURS = {"disttensor", "ops", "reshard"}
_LINE = re.compile(r'"<replay>", line (\d+), in local')
_NAME = re.compile(r"\b[cf]\d+\b")
_OWN = re.compile(r"\bp\d+\b")  # a source that is no argument
_STARTED = re.compile(r"\(\d+, True\)")  # a Way
_STATISTICS = {torch.batch_norm, torch.nn.functional.batch_norm}  # they write to some arguments
_functions: Cache[Any, Any] = Cache(256)  # text and values -> (LocalFunction, the values)


class LocalFunction:
    """A function of locals and its compiled form. ``names``: what each of its lines calls.

    run: the compiled function. breaks: the calls at which its graphs end. is_one_graph: None until
    the first call finds out whether Dynamo can trace all lines.
    """

    def __init__(
        self, local: Function, names: Sequence[str], breaks: dict[str, None], backend: Any,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.names, self.breaks = names, breaks
        options = {"backend": backend, "dynamic": False, **options}
        self.graph = torch.compile(local, **{"fullgraph": True, **options})
        self.run = torch.compile(local, **options)
        self.is_one_graph = False if breaks else None
        self.is_compiled = False  # True from the first call on

    def __call__(self, *tensors: Tensor) -> Any:
        self.is_compiled = True
        if self.is_one_graph is None:
            try:
                result = self.graph(*tensors)
            except RuntimeError as error:
                if not is_untraceable(error):
                    raise
                line = _LINE.search(str(error))
                name = self.names[int(line[1]) - 2] if line else str(error).split("\n")[0]
                self.breaks[name], self.is_one_graph = None, False
            else:
                self.run, self.is_one_graph = self.graph, True
                return result
        return self.run(*tensors)


def compiled(
    program: Program, backend: Any, options: dict[str, Any], breaks: dict[str, None], kind: str
) -> Function:
    """Returns the function of a program with its calls compiled. Adds the names of calls at which a
    graph ends to ``breaks``. ``kind``: of the call, which a line names when it is compiled."""
    register(OPERATORS)
    scope = dict(program.run.__globals__)
    reads = [line.text for line in program.lines if line.kind is LineKind.READ]
    lines = [line for line in program.lines if line.kind is LineKind.CALL]
    calls = [line.call for line in lines if line.call is not None]
    end = [LineKind.WRITE, LineKind.MAKE]
    makes = [line.text for kind in end for line in program.lines if line.kind is kind]
    made = {name for line in lines for name in line.makes}
    given = sorted({v for line in lines for v in tensors_in(line.text)} - made)
    needed = sorted({v for text in [*makes, program.result] for v in variables(text)} & made)
    found: dict[str, None] = {}
    body = [_traced_text(call, scope, found) for call in calls]
    results = "".join(f"{name}, " for name in needed)
    text = _function("local", given, body, f"({results})")
    metas = {name: meta for call in calls for name, meta in call.given.items() if name in given}
    device = next((m.device.type for m in metas.values()), "cpu")
    form = text, tuple(metas.items()), snapshot(device)
    owned = {v for text in reads if _OWN.search(text) for v in tensors_in(text)}
    local = _local_function(form, [_named(c.func) for c in calls], scope, found, backend, options)

    uncounted = [
        given.index(name)
        for call in calls
        if (call.args[1] if call.func is in_mode else call.func) in _STATISTICS
        for name, meta in call.given.items()
        if name in given and not meta.requires_grad
    ]

    def first(*tensors: Tensor) -> Any:
        for name, tensor in zip(given, tensors, strict=True):
            if name in owned:
                mark_parameter(tensor)
        if not local.is_compiled:
            say(f"compile of {kind}")
        result = local(*tensors)
        breaks.update(local.breaks)
        scope["local"] = _uncounting(local.run, uncounted)
        return result

    breaks.update(found)
    scope["local"] = _uncounting(first, uncounted)
    run = f"{f'({results}) = ' if needed else ''}local({', '.join(given)})"
    text = _function("program", program.parameters, [*reads, run, *makes], program.result)
    return define("program", text, scope)


def _uncounting(run: Function, uncounted: Sequence[int]) -> Function:
    """Returns ``run``. Autograd does not count its writes to these arguments: eager batch norm
    writes so to its statistics, and the backward of earlier calls stays possible."""
    if not uncounted:
        return run

    def call(*tensors: Tensor) -> Any:
        with keep_versions(tuple([tensors[i] for i in uncounted])):
            return run(*tensors)

    return call


def _local_function(
    kind: tuple[str, Any, Any], calls: Sequence[str], scope: dict[str, Any],
    breaks: dict[str, None], backend: Any, options: dict[str, Any],
) -> LocalFunction:  # fmt: skip
    """Returns the function that a text defines, the same one for the same text, metadata of its
    tensors, settings (``kind``) and values."""
    text = kind[0]
    names = sorted(set(_NAME.findall(text)))
    values = [scope[name] for name in names]
    key = kind, identities(values), repr(backend), repr(sorted(options.items()))
    if key not in _functions:
        inside = dict(zip(names, values, strict=True))
        inside |= {"set_grad_enabled": torch.set_grad_enabled, "traced_call": traced_call}
        local = define("local", text, inside)
        if backend == "inductor" and _STARTED.search(text):
            options = with_late_waits(options)
        found = LocalFunction(local, calls, breaks, backend, options)
        _functions[key] = found, values  # an id stands for a value only as long as that lives
    found, _ = _functions[key]
    return found


def _traced_text(call: LineCall, scope: dict[str, Any], breaks: dict[str, None]) -> str:
    """Returns the text of a call that torch.compile can trace, or that breaks the graph."""
    words = call.words
    if call.func is in_mode:
        inner = call._replace(func=call.args[1], args=call.args[2:], words=words[2:])
        return f"with set_grad_enabled({words[0]}): {_traced_text(inner, scope, breaks)}"
    func, constants = _traceable(call.func, call.args)
    if constants is not None:
        held = words[2:3] if call.func is grad_types._apply_transition else ()
        words = (words[0], *map(repr, constants), *held)
    elif not _is_traced(func, call.args):
        if not call.writes and func is not cross_mesh._run:
            return opaque(call._replace(func=func), scope)
        breaks[_named(func)] = None
        func = torch.compiler.disable(func)
    name = f"f{len(scope)}"
    scope[name] = func
    return call_text(call._replace(words=words), name)


def reads_what_it_wrote(lines: Sequence[Line]) -> bool:
    """Returns True if the local of a source is read after a write to the source."""
    written: set[str] = set()
    for line in lines:
        if line.kind is LineKind.WRITE:
            written.update(tensors_in(line.text))
        elif line.kind is LineKind.READ and written.intersection(tensors_in(line.text)):
            return True
    return False


def _traceable(func: Function, args: Sequence[Any]) -> tuple[Function, tuple[Any, ...] | None]:
    """Returns the form of a function that communicates which torch.compile traces, and its
    arguments after the tensor; the function itself, and None, for all others."""
    func = getattr(func, "plain", func)
    if func is grad_types._apply_transition and not args[1].casts:
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
        return way_of(transition), (REFUSED, False), 1.0
    back, scale = transition.backward()
    return way_of(transition), way_of(back), scale


def _named(func: Function) -> str:
    """Returns the name of a function; of a local function, the module and the function of its
    rule; of ``apply``, the autograd function."""
    if isinstance(owner := getattr(func, "__self__", None), type):
        return f"{owner.__module__}.{owner.__qualname__}"
    outer, inside, _ = str(getattr(func, "__qualname__", "")).partition(".<locals>")
    return f"{func.__module__}.{outer}" if inside else name_of(func)


def _is_traced(func: Function, args: Sequence[Any]) -> bool:
    """Returns True for functions of torch, for functions of ours that do nothing but call them, and
    for autograd functions of users."""
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
