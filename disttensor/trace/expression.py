"""Expressions of a recorded program, as data.

    Variable    ``t3``: a tensor that a line has made
    SourceName  ``x0``, ``p1``: a tensor that the program starts from
    Constant    ``c2``: an object in the scope of the program
    Apply       a call of an expression with expressions
    Attribute   ``x0.local``

A bool, an int or None stands for itself; a list, tuple or dict for a container of expressions.
``show`` prints an expression as Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

Function = Callable[..., Any]


class Name(str):
    __slots__ = ()


class Variable(Name):
    __slots__ = ()


class SourceName(Name):
    __slots__ = ()


class Constant(Name):
    __slots__ = ()


class Apply(NamedTuple):
    func: Any
    args: Sequence[Any] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()  # hashable: a key of a dict may be a call


class Attribute(NamedTuple):
    owner: Name
    attribute: str


N = TypeVar("N", bound=Name)


def names(x: Any, kind: type[N]) -> Iterator[N]:
    """Yields the names of this kind in an expression, in order; a name that it has twice, twice."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from names(key, kind)
            yield from names(value, kind)
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from names(part, kind)


def show(x: Any, name: Callable[[Name], str] = str) -> str:
    """Returns the text of an expression. ``name(x)``: the text of a name."""
    if isinstance(x, Name):
        return name(x)
    if isinstance(x, Attribute):
        return f"{show(x.owner, name)}.{x.attribute}"
    if isinstance(x, Apply):
        words = [show(a, name) for a in x.args]
        words += [f"{key}={show(value, name)}" for key, value in x.kwargs]
        return f"{show(x.func, name)}({', '.join(words)})"
    if isinstance(x, list):
        return f"[{', '.join(show(v, name) for v in x)}]"
    if isinstance(x, tuple):
        return "(" + "".join(f"{show(v, name)}, " for v in x) + ")"
    if isinstance(x, dict):
        items = (f"{show(k, name)}: {show(v, name)}" for k, v in x.items())
        return "{" + ", ".join(items) + "}"
    return f"({x!r})" if type(x) is int and x < 0 else repr(x)


def show_line(target: Any, value: Any, name: Callable[[Name], str] = str) -> str:
    """Returns the text of an assignment, or of a call whose result is dropped: ``target`` None."""
    text = show(value, name)
    return text if target is None else f"{show(target, name)} = {text}"


def define(
    name: str, parameters: Iterable[str], lines: Iterable[str], result: Any, scope: dict[str, Any]
) -> tuple[Function, str]:
    """Returns the function of these lines that returns the expression ``result``, and its text."""
    body = "".join(f"    {line}\n" for line in lines)
    text = f"def {name}({', '.join(parameters)}):\n{body}    return {show(result)}\n"
    exec(compile(text, "<replay>", "exec"), scope)
    return scope[name], text
