"""The audit: how a new recording of a forward differs from its program."""

from __future__ import annotations

import re
from itertools import zip_longest

from disttensor.errors import name_of, show_place
from disttensor.pytree import CONSTANTS
from disttensor.trace.record import Program


def difference(program: Program, again: Program | str) -> str:
    """Returns the first line in which a new recording differs from a program, or ""."""
    if isinstance(again, str):
        return again
    for line, new in zip_longest(program.lines, again.lines):
        then = "" if line is None else _with_constants(line.text, program)
        now = "" if new is None else _with_constants(new.text, again)
        if then != now:
            place = "" if new is None or new.place is None else f" at {show_place(new.place)}"
            return f"{now or 'nothing'}{place} in place of {then or 'nothing'}"
    results = [_with_constants(p.result, p) for p in (program, again)]
    return "" if results[0] == results[1] else f"it returns {results[1]} in place of {results[0]}"


def _with_constants(text: str, program: Program) -> str:
    """Returns the text of a line with the values of its constants."""

    def show(found: re.Match[str]) -> str:
        value = program.scope[found[0]]
        if type(value) in CONSTANTS:
            return f"{value!r}"
        name = name_of(value) if callable(value) else ""
        return name or type(value).__qualname__

    return re.sub(r"\bc\d+\b", show, text)
