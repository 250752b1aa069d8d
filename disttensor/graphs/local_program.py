"""A recorded program with its calls as one function that ``torch.compile`` compiles.

Calls of torch and of traceable communication are given as they are. Other local functions that
communicate or draw are one operator each (``opaque_call``). Programs with the same calls, as of the
blocks of a model, share one compiled function: their tensors are its arguments.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from disttensor.autograd import functional, grad_types
from disttensor.autograd.grad_types import GradTransition
from disttensor.cache import Cache
from disttensor.comm import collectives
from disttensor.errors import name_of
from disttensor.graphs.late_waits import with_late_waits
from disttensor.graphs.opaque_call import OPERATORS, identities, opaque
from disttensor.graphs.traced_comm import (
    REFUSED,
    TracedTransition,
    number_of,
    register,
    traced_gather,
    traced_reshard,
    traced_sum,
    traced_transition,
)
from disttensor.progress import say
from disttensor.settings import snapshot
from disttensor.torch_private import is_untraceable, keep_versions, mark_parameter
from disttensor.trace.expression import Apply, Constant, Name, define, names, show_line
from disttensor.trace.record import Program, in_mode
from disttensor.trace.tape import Line, LineKind
from reshard import cross_mesh

Tensor = torch.Tensor
Function = Callable[..., Any]

_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OURS = {"disttensor", "ops", "reshard"}
_LINE = re.compile(r'"<replay>", line (\d+), in local')
_STATISTICS = {torch.batch_norm, torch.nn.functional.batch_norm}  # they write to some arguments
_functions: Cache[Any, Any] = Cache(256)  # text and values -> (LocalFunction, the values)


class Statement(NamedTuple):
    """A line of a compiled function: an assignment, in a grad mode if one is given."""

    target: Any
    value: Apply
    grad: bool | None


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
    # Reads may come first: ``reads_what_it_wrote`` refuses programs that read after a write.
    of = {kind: [line for line in program.lines if line.kind is kind] for kind in LineKind}
    reads, lines = of[LineKind.READ], of[LineKind.CALL]
    makes = of[LineKind.WRITE] + of[LineKind.MAKE]
    made = {name for line in lines for name in line.makes()}
    given = sorted({name for line in lines for name in line.reads()} - made)
    used = {name for line in makes for name in line.reads()} | {*names(program.result, Name)}
    needed = tuple(sorted(used & made))
    found: dict[str, None] = {}
    body = [_traced(line, scope, found) for line in lines]
    calls = [line.call for line in lines if line.call is not None]
    metas = {name: meta for call in calls for name, meta in call.given.items() if name in given}
    device = next((m.device.type for m in metas.values()), "cpu")
    form = tuple(metas.items()), snapshot(device)
    owned = {
        name
        for line in reads
        if not {*line.reads()} <= {*program.parameters}
        for name in (*line.reads(), *line.makes())
    }
    functions = [_called(line, scope)[0] for line in lines]
    local = _local_function(
        given, body, needed, form, [*map(_named, functions)], scope, found, backend, options
    )
    uncounted = [
        given.index(name)
        for call, func in zip(calls, functions, strict=True)
        if func in _STATISTICS
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
    run = show_line(needed or None, Apply(Constant("local"), given))
    before, after = [[show_line(x.target, x.value) for x in some] for some in (reads, makes)]
    return define("program", program.parameters, [*before, run, *after], program.result, scope)[0]


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
    given: Sequence[Name], body: Sequence[Statement], results: Any, form: Any, calls: Sequence[str],
    scope: dict[str, Any], breaks: dict[str, None], backend: Any, options: dict[str, Any],
) -> LocalFunction:  # fmt: skip
    """Returns the function of the lines ``body``, the same one for the same lines and values,
    metadata of its tensors and settings (``form``)."""
    values: dict[str, Any] = {name: scope[name] for name in sorted({*names(body, Constant)})}
    texts = tuple(map(_text, body))
    how = repr((backend, sorted(options.items())))
    key = tuple(given), texts, results, form, identities(values.values()), how
    if key not in _functions:
        held = [*values.values()]
        values["set_grad_enabled"] = torch.set_grad_enabled
        local, _ = define("local", given, texts, results, values)
        if backend == "inductor" and _starts(body):
            options = with_late_waits(options)
        found = LocalFunction(local, calls, breaks, backend, options)
        _functions[key] = found, held  # an id stands for a value only as long as that lives
    found, _ = _functions[key]
    return found


def _text(line: Statement) -> str:
    text = show_line(line.target, line.value)
    return text if line.grad is None else f"with set_grad_enabled({line.grad}): {text}"


def _starts(x: Any) -> bool:
    """Returns True if a reshard in an expression is started and waited for."""
    if isinstance(x, TracedTransition):
        return x.starts
    return isinstance(x, (list, tuple)) and any(map(_starts, x))


def _called(line: Line, scope: dict[str, Any]) -> tuple[Function, bool | None, Apply]:
    """Returns the function that a line calls, the grad mode that it sets, or None, and the call."""
    assert line.call is not None
    if line.call.func is not in_mode:
        return line.call.func, None, line.value
    grad, name, *args = line.value.args
    return scope[name], grad, Apply(name, args, line.value.kwargs)


def _traced(line: Line, scope: dict[str, Any], breaks: dict[str, None]) -> Statement:
    """Returns a line that torch.compile can trace, or that breaks the graph."""
    func, grad, value = _called(line, scope)
    # None: tensors, and containers
    args = [scope[a] if isinstance(a, Constant) else None for a in value.args]
    traceable, constants = _traceable(func, args)
    if constants is not None:
        held = value.args[2:3] if func is grad_types._apply_transition else ()
        value = value._replace(args=(value.args[0], *constants, *held))
    elif not _is_traced(traceable, args):
        if line.call is not None and not line.call.writes and traceable is not cross_mesh._run:
            return Statement(*opaque(line, value, traceable, scope), grad)
        breaks[_named(traceable)] = None
        traceable = torch.compiler.disable(traceable)
    name = Constant(f"f{len(scope)}")
    scope[name] = traceable
    return Statement(line.target, value._replace(func=name), grad)


def reads_what_it_wrote(lines: Sequence[Line]) -> bool:
    """Returns True if the local of a source is read after a write to the source."""
    written: set[Name] = set()
    for line in lines:
        if line.kind is LineKind.WRITE:
            written.update(line.reads())
        elif line.kind is LineKind.READ and written.intersection(line.reads()):
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
        return traced_transition(transition), TracedTransition(REFUSED, False), 1.0
    back, scale = transition.backward()
    return traced_transition(transition), traced_transition(back), scale


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
