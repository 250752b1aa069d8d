"""The audit: how a new recording of a forward differs from its program."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

from disttensor.autograd.grad_types import GradTransition
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of, show_place
from disttensor.pytree import CONSTANTS
from disttensor.trace.expression import Constant, Name, show, show_line
from disttensor.trace.record import Program
from disttensor.trace.tape import Line


def difference(program: Program, again: Program | str) -> str:
    """Returns the first line in which a new recording differs from a program, or ""."""
    if isinstance(again, str):
        return again
    for line, new in zip_longest(program.lines, again.lines):
        then, now = _text(line, program), _text(new, again)
        if then != now:
            place = "" if new is None or new.place is None else f" at {show_place(new.place)}"
            return f"{now or 'nothing'}{place} in place of {then or 'nothing'}"
    results = [show(p.result, partial(_name, p)) for p in (program, again)]
    return "" if results[0] == results[1] else f"it returns {results[1]} in place of {results[0]}"


def _text(line: Line | None, program: Program) -> str:
    """Returns the text of a line with the values of its constants."""
    name = partial(_name, program)
    return "" if line is None else show_line(line.target, line.value, name)


def _name(program: Program, name: Name) -> str:
    if not isinstance(name, Constant):
        return name
    value = program.scope[name]
    if type(value) in CONSTANTS or isinstance(value, DistSpec):
        return f"{value!r}"
    if isinstance(value, GradTransition):
        return f"{value.src} to {value.dst}"
    function = name_of(value) if callable(value) else ""
    return function or type(value).__qualname__
