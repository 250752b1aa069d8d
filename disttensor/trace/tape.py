"""Tape: the calls on locals that one forward makes, as lines of a generated Python function.

Each line is one call, and assigns tensors to variables. The *sources* are arguments, parameters and
captured tensors. The function reads a source at the first line that needs it: of a leaf, it gets
the alias that collects gradients at that time.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from disttensor.errors import Place, user_place
from disttensor.pytree import CONSTANTS, collect, find_tensors
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import no_function_mode
from disttensor.trace.world_state import Untraceable

Tensor = torch.Tensor
Function = Callable[..., Any]

_PLAIN = frozenset({int, bool, type(None)})
_VARIABLE = re.compile(r"\bt\d+\b")
_TENSOR = re.compile(r"\b[txp]\d+\b")


# READ: a source's local. CALL: a call. WRITE: a write. MAKE: a result.
LineKind = Enum("LineKind", "READ CALL WRITE MAKE")


class LocalMeta(NamedTuple):
    """The metadata of a local tensor. ``stride``: in dense memory; ``strides``: its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class LineCall(NamedTuple):
    """A call of locals: ``words`` are the texts of its arguments and keywords, ``target`` of the
    result. ``args``: the arguments, with None for tensors, which a program does not keep;
    ``given``, ``made``: the tensors of the arguments and the result; ``writes``: to arguments."""

    func: Function
    args: tuple[Any, ...]
    words: tuple[str, ...]
    target: str
    given: dict[str, LocalMeta] = {}  # noqa: RUF012
    made: dict[str, LocalMeta] = {}  # noqa: RUF012
    writes: bool = False


class Line(NamedTuple):
    """``text``: an assignment or a call; ``makes``: the variables that it assigns; ``idle``: unless
    they are used, the line is dropped; ``order``: how the line permutes the dims of ``of``, if it
    does only this; ``call``: None unless the kind is CALL; ``place``: the line of the user."""

    kind: LineKind
    text: str
    makes: frozenset[str]
    idle: bool = False
    of: str = ""
    order: tuple[int, ...] = ()
    call: LineCall | None = None
    place: Place = None


class Tape:
    """``sources``: the tensors that the function starts from, by their names in its text."""

    def __init__(self, sources: dict[str, Tensor]) -> None:
        self.lines: list[Line] = []
        self.scope: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._names: dict[int, str] = {}  # id of a regular tensor -> its variable
        self._kept: list[Any] = []  # keeps objects alive whose ids are used
        self._made = 0
        self.sources = {id(x): name for name, x in sources.items()}
        self._locals = {id(getattr(x, "local", x)): name for name, x in sources.items()}
        self._kept += sources.values()
        self._dist = {name for name, x in sources.items() if isinstance(x, MeshTensor)}
        self._read: dict[str, str] = {}  # a source -> the variable that has its local

    # Names ----------------------------------------------------------------------------------------

    def new_variable(self) -> str:
        self._made += 1
        return f"t{self._made}"

    def constant(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
            self.scope[name] = value
        return name

    def variable_of(self, t: Tensor) -> str:
        """Returns the variable of a regular tensor. Raises Untraceable if its origin is unknown."""
        found = self._names.get(id(t))
        if found is None:
            source = self._locals.get(id(t))
            if source is None:
                raise Untraceable(
                    f"it reads a tensor of shape {list(t.shape)} that is none of its arguments, "
                    "parameters, attributes or closure, nor made by a function of torch in it"
                )
            if source not in self._dist:
                return source
            found = self.new_variable()
            self.add_line(LineKind.READ, f"{found} = {source}.local", found, idle=True)
            self._read[source] = found
            self._names[id(t)] = found
            self._kept.append(t)
        return found

    def source_of(self, x: Any) -> str | None:
        """Returns the name of ``x`` if it is a source, else None."""
        return self.sources.get(id(x))

    def local_variable_of(self, source: str) -> str | None:
        """Returns the variable that has the local of a source as read, or None if unread."""
        return self._read.get(source)

    def has_variable(self, t: Tensor) -> bool:
        return id(t) in self._names

    def position(self) -> Any:
        """Returns the present position of the tape, for ``rewind``."""
        return len(self.lines), dict(self._names), dict(self._read)

    def rewind(self, position: Any) -> None:
        count, self._names, self._read = position
        del self.lines[count:]

    # Lines ----------------------------------------------------------------------------------------

    def add_line(self, kind: LineKind, text: str, *makes: str, idle: bool = False) -> None:
        self.lines.append(Line(kind, text, frozenset(makes), idle))

    def add_call(
        self, func: Function, args: Any, kwargs: Any, out: Any, idle: bool = False,
        order: tuple[int, ...] = (), writes: bool = False,
    ) -> None:  # fmt: skip
        """Records ``out = func(*args, **kwargs)``, which has run; ``order``: the order in which it
        puts the dims of the first argument; ``writes``: it has written to arguments."""
        words = (*map(self.text, args), *(f"{k}={self.text(v)}" for k, v in kwargs.items()))
        made: dict[str, Tensor] = {}
        target = self._target(out, made)
        given = {self.text(t): _meta(t) for t in collect((args, kwargs), [])}
        kept = tuple([None if collect(a, []) else a for a in args])
        results = {name: _meta(t) for name, t in made.items()}
        call = LineCall(func, kept, words, target if made else "", given, results, writes)
        of, text = words[0] if order else "", call_text(call, self.constant(func))
        place = user_place(sys._getframe(1))
        self.lines.append(Line(LineKind.CALL, text, frozenset(made), idle, of, order, call, place))

    def text(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, Tensor):
            if kind is DistTensor:
                raise Untraceable("a DistTensor is given to what runs on locals")
            return self.variable_of(value)
        if kind in (list, tuple, dict):
            return container_text(value, self.text)
        if isinstance(value, tuple) and kind is not torch.Size:
            items = container_text(tuple(value), self.text)
            return f"{self.constant(_tuple_of)}({self.constant(kind)}, {items})"
        if kind in _PLAIN:
            return f"({value!r})" if kind is int and value < 0 else repr(value)
        if why := getattr(value, "untraceable", ""):  # an object that is empty after the call
            raise Untraceable(why)
        if kind not in CONSTANTS and find_tensors(value, attributes=True):
            raise Untraceable(f"a function of torch gets a {kind.__name__} that holds tensors")
        return self.constant(value)

    def _target(self, value: Any, made: dict[str, Tensor]) -> str:
        if isinstance(value, Tensor):
            name = self.bind(value)
            made[name] = value
            return name
        if isinstance(value, (list, tuple)) and any(
            isinstance(v, (Tensor, list, tuple)) for v in value
        ):
            return "(" + "".join(f"{self._target(v, made)}, " for v in value) + ")"
        return "_"

    def bind(self, t: Tensor) -> str:
        """Returns a new variable for ``t``."""
        name = self._names[id(t)] = self.new_variable()
        self._kept.append(t)
        return name

    def _merge_permutes(self, needed: set[str]) -> list[Line]:
        """Returns the lines, with consecutive permutations merged into one if the tensor between
        them is read nowhere else."""
        reads = Counter(name for line in self.lines for name in variables(line.text))
        made: dict[str, Line] = {}
        out: list[Line] = []
        for line in self.lines:
            before = made.get(line.of)
            # made by one line and read by this line only
            if before is not None and reads[line.of] == 2 and line.of not in needed:
                out.remove(before)
                order, (name,) = tuple(before.order[d] for d in line.order), line.makes
                call = LineCall(Tensor.permute, (), (before.of, repr(order)), name)
                text = call_text(call, self.constant(Tensor.permute))
                line = Line(LineKind.CALL, text, line.makes, False, before.of, order, call)
            if line.order:
                made.update(dict.fromkeys(line.makes, line))
            out.append(line)
        return out

    # Results --------------------------------------------------------------------------------------

    def live_lines(self, result: str, merge: bool) -> list[Line]:
        """Returns the lines that ``result`` needs, or that have an effect; with ``merge``,
        consecutive permutations of dims are one."""
        needed = set(variables(result))
        kept: list[Line] = []
        for line in reversed(self._merge_permutes(needed) if merge else self.lines):
            if not line.idle or line.makes & needed:
                kept.append(line)
                needed |= set(variables(line.text))
        return kept[::-1]

    def build_function(
        self, parameters: Sequence[str], lines: Sequence[Line], result: str
    ) -> tuple[Function, str]:
        """Returns the function of ``parameters`` that runs the lines and returns ``result``, and
        its text. It deletes each variable after its last use, as user code would."""
        needed = set(variables(result))
        kept: list[str] = []
        for line in reversed(lines):
            read = set(variables(line.text))
            over = sorted((read | line.makes) - needed, key=lambda name: int(name[1:]))
            if over:  # also deletes unused results
                kept.append(f"    del {', '.join(over)}")
            kept.append(f"    {line.text}")
            needed = (needed - line.makes) | (read - line.makes)
        text = "\n".join([f"def program({', '.join(parameters)}):", *reversed(kept)])
        text += f"\n    return {result}\n"
        return define("program", text, dict(self.scope)), text


def _meta(t: Tensor) -> LocalMeta:
    with no_function_mode():
        stride = torch.empty_like(t, device="meta").stride()  # dense
        return LocalMeta(t.shape, stride, t.stride(), t.dtype, t.device, t.requires_grad)


def _tuple_of(kind: type, items: tuple[Any, ...]) -> Any:
    """Returns a named tuple, or a result of torch that looks like one."""
    is_torchs = kind.__module__ == "torch.return_types"
    return kind(items) if is_torchs else tuple.__new__(kind, items)


def variables(text: str) -> list[str]:
    return _VARIABLE.findall(text)


def tensors_in(text: str) -> list[str]:
    """Returns the names of the variables and sources in ``text``."""
    return _TENSOR.findall(text)


def define(name: str, text: str, scope: dict[str, Any]) -> Function:
    """Returns the function ``name`` that ``text`` defines."""
    exec(compile(text, "<replay>", "exec"), scope)
    function: Function = scope[name]
    return function


def call_text(call: LineCall, name: str) -> str:
    """Returns the text of a call, in which ``name`` is the function."""
    text = f"{name}({', '.join(call.words)})"
    return f"{call.target} = {text}" if call.target else text


def is_constant(value: Any) -> bool:
    return type(value) in CONSTANTS


def container_text(value: Any, text: Callable[[Any], str]) -> str:
    """Returns the text of a list, tuple or dict whose items have the text ``text(item)``."""
    if type(value) is list:
        return "[" + ", ".join(map(text, value)) + "]"
    if type(value) is tuple:
        return "(" + "".join(f"{text(v)}, " for v in value) + ")"
    return "{" + ", ".join(f"{text(k)}: {text(v)}" for k, v in value.items()) + "}"
