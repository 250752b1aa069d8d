"""Tape: the calls on locals that one forward makes, as lines of a program.

Each line is one call, and assigns tensors to variables. The *sources* are arguments, parameters and
captured tensors. The program reads a source at the first line that needs it: of a leaf, it gets the
alias that collects gradients at that time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from disttensor.errors import Place, user_place
from disttensor.pytree import CONSTANTS, collect, find_tensors
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import no_function_mode
from disttensor.trace.expression import (
    Apply,
    Attribute,
    Constant,
    Name,
    SourceName,
    Variable,
    define,
    names,
    show_line,
)
from disttensor.trace.world_state import Untraceable

Tensor = torch.Tensor
Function = Callable[..., Any]

_PLAIN = frozenset({int, bool, type(None)})
UNUSED = Name("_")  # a result that is no tensor

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
    """A call of locals: the function, the metadata of its arguments and of its results by name, and
    whether it writes to arguments."""

    func: Function
    given: dict[Name, LocalMeta] = {}  # noqa: RUF012
    made: dict[Name, LocalMeta] = {}  # noqa: RUF012
    writes: bool = False


class Line(NamedTuple):
    """``target = value``, two expressions; a call alone if ``target`` is None. ``if_used``: the
    line is dropped unless its variables are used; ``order``: how the line permutes the dims of its
    first argument, if it does only this; ``call``: None unless the kind is CALL; ``place``: the
    line of the user."""

    kind: LineKind
    target: Any
    value: Any
    if_used: bool = False
    order: tuple[int, ...] = ()
    call: LineCall | None = None
    place: Place = None

    def makes(self) -> set[Variable]:
        return set(_assigned(self.target))

    def reads(self) -> Iterator[Name]:
        """Yields the variables and sources that the line reads, or whose attributes it sets."""
        own = self.makes()
        for name in names((self.target, self.value), Name):
            if isinstance(name, (Variable, SourceName)) and name not in own:
                yield name


def _assigned(target: Any) -> Iterator[Variable]:
    if isinstance(target, Variable):
        yield target
    elif type(target) is tuple:
        for part in target:
            yield from _assigned(part)


class Tape:
    """``sources``: the tensors that the program starts from, by their names."""

    def __init__(self, sources: dict[str, Tensor]) -> None:
        self.lines: list[Line] = []
        self.scope: dict[str, Any] = {}
        self._constants: dict[int, Constant] = {}
        self._names: dict[int, Name] = {}  # id of a regular tensor -> its variable
        self._kept: list[Any] = []  # keeps objects alive whose ids are used
        self._made = 0
        self.sources = {id(x): SourceName(name) for name, x in sources.items()}
        self._locals = {id(getattr(x, "local", x)): SourceName(name) for name, x in sources.items()}
        self._kept += sources.values()
        self._dist = {name for name, x in sources.items() if isinstance(x, MeshTensor)}
        self._read: dict[SourceName, Variable] = {}  # a source -> the variable that has its local

    # Names ----------------------------------------------------------------------------------------

    def new_variable(self) -> Variable:
        self._made += 1
        return Variable(f"t{self._made}")

    def constant(self, value: Any) -> Constant:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = Constant(f"c{len(self._constants)}")
            self.scope[name] = value
        return name

    def apply(self, func: Function, *args: Any) -> Apply:
        """Returns a call of ``func`` with these expressions."""
        return Apply(self.constant(func), args)

    def variable_of(self, t: Tensor) -> Name:
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
            self.add_line(LineKind.READ, found, Attribute(source, "local"), if_used=True)
            self._read[source] = found
            self._names[id(t)] = found
            self._kept.append(t)
        return found

    def source_of(self, x: Any) -> SourceName | None:
        """Returns the name of ``x`` if it is a source, else None."""
        return self.sources.get(id(x))

    def local_variable_of(self, source: SourceName) -> Variable | None:
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

    def add_line(self, kind: LineKind, target: Any, value: Any, if_used: bool = False) -> None:
        self.lines.append(Line(kind, target, value, if_used))

    def add_call(
        self, func: Function, args: Any, kwargs: Any, out: Any, if_used: bool = False,
        order: tuple[int, ...] = (), writes: bool = False,
    ) -> None:  # fmt: skip
        """Records ``out = func(*args, **kwargs)``, which has run; ``order``: the order in which it
        puts the dims of the first argument; ``writes``: it has written to arguments."""
        given = tuple(map(self.expression, args))
        named = tuple([(k, self.expression(v)) for k, v in kwargs.items()])
        metas = {self.variable_of(t): _meta(t) for t in collect((args, kwargs), [])}
        made: dict[Name, LocalMeta] = {}
        target = self._target(out, made)
        value, call = Apply(self.constant(func), given, named), LineCall(func, metas, made, writes)
        target, place = target if made else None, user_place(sys._getframe(1))
        self.lines.append(Line(LineKind.CALL, target, value, if_used, order, call, place))

    def expression(self, value: Any) -> Any:
        """Returns the expression of a value that a function on locals receives."""
        kind = type(value)
        if isinstance(value, Tensor):
            if kind is DistTensor:
                raise Untraceable("a DistTensor is given to what runs on locals")
            return self.variable_of(value)
        if kind in (list, tuple, dict):
            return map_container(value, self.expression)
        if isinstance(value, tuple) and kind is not torch.Size:
            items = tuple(map(self.expression, value))
            return self.apply(make_tuple, self.constant(kind), items)
        if kind is slice:
            ends = value.start, value.stop, value.step
            if any(isinstance(end, Tensor) for end in ends):
                raise Untraceable("a slice ends at a tensor, whose value torch reads")
            return self.apply(slice, *map(self.expression, ends))
        if kind in _PLAIN:
            return value
        if why := getattr(value, "untraceable", ""):  # an object that is empty after the call
            raise Untraceable(why)
        if kind not in CONSTANTS and find_tensors(value, attributes=True):
            raise Untraceable(f"a function of torch gets a {kind.__name__} that holds tensors")
        return self.constant(value)

    def _target(self, value: Any, made: dict[Name, LocalMeta]) -> Any:
        if isinstance(value, Tensor):
            name = self.bind(value)
            made[name] = _meta(value)
            return name
        if isinstance(value, (list, tuple)) and any(
            isinstance(v, (Tensor, list, tuple)) for v in value
        ):
            return tuple([self._target(v, made) for v in value])
        return UNUSED

    def bind(self, t: Tensor) -> Variable:
        """Returns a new variable for ``t``."""
        name = self._names[id(t)] = self.new_variable()
        self._kept.append(t)
        return name

    def _merge_permutes(self, needed: set[Name]) -> list[Line]:
        """Returns the lines, with consecutive permutations merged into one if the tensor between
        them is read nowhere else."""
        reads = Counter(name for line in self.lines for name in line.reads())
        made: dict[Name, Line] = {}
        out: list[Line] = []
        for line in self.lines:
            permuted: Any = line.value.args[0] if line.order else None
            before = made.get(permuted)
            if before is not None and reads[permuted] == 1 and permuted not in needed:
                out.remove(before)
                order = tuple(before.order[d] for d in line.order)
                value = self.apply(Tensor.permute, before.value.args[0], order)
                call = LineCall(Tensor.permute)
                line = Line(LineKind.CALL, line.target, value, False, order, call)
            if line.order:
                made.update(dict.fromkeys(line.makes(), line))
            out.append(line)
        return out

    # Results --------------------------------------------------------------------------------------

    def live_lines(self, result: Any, merge: bool) -> list[Line]:
        """Returns the lines that ``result`` needs, or that have an effect; with ``merge``,
        consecutive permutations of dims are one."""
        needed: set[Name] = set(names(result, Variable))
        kept: list[Line] = []
        for line in reversed(self._merge_permutes(needed) if merge else self.lines):
            if not line.if_used or line.makes() & needed:
                kept.append(line)
                needed |= set(line.reads())
        return kept[::-1]

    def build_function(
        self, parameters: Sequence[str], lines: Sequence[Line], result: Any
    ) -> tuple[Function, str]:
        """Returns the function of ``parameters`` that runs the lines and returns ``result``, and
        its text. It deletes each variable after its last use, as user code would."""
        needed = set(names(result, Variable))
        kept: list[str] = []
        for line in reversed(lines):
            makes = line.makes()
            reads = {name for name in line.reads() if isinstance(name, Variable)}
            over = sorted((reads | makes) - needed, key=lambda name: int(name[1:]))
            if over:  # also deletes unused results
                kept.append(f"del {', '.join(over)}")
            kept.append(show_line(line.target, line.value))
            needed = (needed - makes) | reads
        return define("program", parameters, reversed(kept), result, dict(self.scope))


def _meta(t: Tensor) -> LocalMeta:
    with no_function_mode():
        stride = torch.empty_like(t, device="meta").stride()  # dense
        return LocalMeta(t.shape, stride, t.stride(), t.dtype, t.device, t.requires_grad)


def make_tuple(kind: type, items: tuple[Any, ...]) -> Any:
    """Returns a named tuple, or a result of torch that looks like one."""
    is_torchs = kind.__module__ == "torch.return_types"
    return kind(items) if is_torchs else tuple.__new__(kind, items)


def map_container(value: Any, expression: Callable[[Any], Any]) -> Any:
    """Returns a list, tuple or dict of the expressions of its items."""
    if type(value) is dict:
        return {expression(k): expression(v) for k, v in value.items()}
    return type(value)(map(expression, value))


def is_constant(value: Any) -> bool:
    return type(value) in CONSTANTS
