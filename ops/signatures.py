"""Torch's own signatures: the position of an argument that is given by name, and which arguments
are tensors.

A rule receives the arguments of a call by position, up to the first gap, and the others by torch's
names. So a rule may give its own parameters any names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import Parameter, signature, unwrap
from typing import Any, NamedTuple

from torch import Tensor

from disttensor.pytree import collect, substitute
from disttensor.torch_private import schemas_named

Function = Callable[..., Any]

# The names of numpy arguments that torch's parser accepts in addition to its own.
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input",
          "x2": "other"}  # fmt: skip
_SIMPLE = (int, float, bool, str, type(None))
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Signature(NamedTuple):
    """One way to call a function.

    names     of the arguments that may be positional, in order
    words     of the keyword-only arguments
    tensors   the names of arguments that may be or contain tensors ("*": more by position)
    required  the names of arguments without a default
    open      accepts any number of positional arguments: view(2, 3)
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    tensors: frozenset[str]
    required: frozenset[str]
    open: bool

    def named(self, word: str) -> str:
        """Returns the name of the argument that ``word`` gives."""
        return word if word in self.names or word in self.words else _NUMPY.get(word, word)

    def tensor_at(self, at: int | str) -> bool:
        """Returns True if the argument at a position or with a name may be a tensor."""
        if isinstance(at, str):
            return self.named(at) in self.tensors
        return (self.names[at] if at < len(self.names) else "*") in self.tensors

    def fits(self, n: int, words: Sequence[str]) -> bool:
        """Returns True if a call with n positional arguments and these keywords is valid."""
        given = {self.named(word) for word in words}
        return (
            (self.open or n <= len(self.names))
            and given <= {*self.names[n:], *self.words}
            and self.required <= given.union(self.names[:n])
        )


@cache
def signatures(func: Function) -> tuple[Signature, ...]:
    """Returns all ways to call ``func``; none if torch does not list them."""
    name, inner = getattr(func, "__name__", ""), unwrap(func)
    if name.startswith("__") or not name:
        return ()
    own = (getattr(inner, "__module__", "") or "torch").startswith("torch")
    said = schemas_named(name) if own else []
    said = [s for s in said if any("Tensor" in str(a.type) for a in s.arguments)]
    given = [*signature(inner).parameters.values()] if hasattr(inner, "__code__") else []
    if not given or any(p.kind is Parameter.VAR_KEYWORD for p in given):
        return tuple(map(_of_schema, said))
    numbers = {a.name for s in said for a in s.arguments if "Tensor" not in str(a.type)}
    return (_of_python(given, numbers),)


def _of_schema(schema: Any) -> Signature:
    given = [a for a in schema.arguments if not a.is_out]
    names = {a.name: "input" if a.name == "self" else a.name for a in given}
    return Signature(
        tuple(names[a.name] for a in given if not a.kwarg_only),
        tuple(names[a.name] for a in given if a.kwarg_only),
        frozenset(names[a.name] for a in given if "Tensor" in str(a.type)),
        frozenset(names[a.name] for a in given if not a.has_default_value()),
        any("List[int]" in str(a.type) for a in given if not a.kwarg_only),
    )


def _of_python(given: Sequence[Parameter], numbers: set[str]) -> Signature:
    """Returns the signature of a Python function. ``numbers``: the arguments that are not tensors
    in the schemas of the same name."""
    bare = Parameter.empty
    return Signature(
        tuple(p.name for p in given if p.kind in _BY_POSITION),
        tuple(p.name for p in given if p.kind is Parameter.KEYWORD_ONLY),
        frozenset(
            "*" if p.kind is Parameter.VAR_POSITIONAL else p.name for p in given
            if "Tensor" in str(p.annotation)
            or (p.annotation in (bare, Any) and p.name not in numbers)
        ),
        frozenset(p.name for p in given if p.default is bare and p.kind in _BY_POSITION),
        any(p.kind is Parameter.VAR_POSITIONAL for p in given),
    )  # fmt: skip


def chosen(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature | None:
    """Returns the signature that such a call has."""
    fitting: Iterator[Signature] = (s for s in signatures(func) if s.fits(len(args), [*kwargs]))
    return next(fitting, None)


def by_position(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], reader: Function | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the call as a rule receives it: by position up to the first gap, the others by
    torch's names, in the order of its signature. ``reader``, the rule, may take options by name."""
    read = list(args)
    said = chosen(func, args, kwargs) if kwargs else None
    if said is None:
        return read, kwargs
    given = {said.named(k): v for k, v in kwargs.items()}
    for name in said.names[len(read) : None if reader is None else _places(reader)]:
        if name not in given:
            break
        read.append(given.pop(name))
    return read, {k: given[k] for k in (*said.names, *said.words) if k in given}


@cache
def _places(reader: Function) -> int | None:
    """Returns how many arguments a rule takes by position, if it takes the others by name."""
    given = signature(reader).parameters.values()
    if all(p.kind is not Parameter.VAR_KEYWORD for p in given):
        return None
    return sum(p.kind in _BY_POSITION for p in given)


def normalize_call(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """Returns the same call with its tensors in the order of torch's signature, the first tensor by
    position. 0-d tensors used as numbers (a size, a dim, an end of a slice) become numbers.
    Returns None if the call has this form already."""
    if not kwargs and all(map(_stays, args)):
        return None  # most calls need no signature of torch

    def read(at: int | str, value: Any) -> Any:
        if isinstance(value, slice) or type(value) is tuple:
            value = _index(value)
        if all(t.ndim for t in collect(value, [])):
            return value  # most values need no signature of torch
        ways = signatures(func)
        taken = not ways or any(s.tensor_at(at) for s in ways)
        return value if taken else substitute(value, _number)

    said = chosen(func, args, kwargs) if kwargs and collect(kwargs, []) else None
    placed, words = args, kwargs
    if said is not None:
        order = {name: i for i, name in enumerate((*said.names, *said.words))}
        places = [order[said.named(k)] for k, v in kwargs.items() if collect(v, [])]
        if not args or places != sorted(places):
            placed, words = by_position(func, args, kwargs)
    numbers = [read(i, v) for i, v in enumerate(placed)]
    named = {k: v if k == "out" else read(k, v) for k, v in words.items()}
    same = placed is args and all(
        a is b for a, b in zip((*args, *kwargs.values()), (*numbers, *named.values()), strict=True)
    )
    return None if same else (numbers, named)


def _stays(value: Any) -> bool:
    """Returns True if the value is used unchanged at any position: it is no 0-d tensor, and cannot
    hold one."""
    return type(value) in _SIMPLE or (isinstance(value, Tensor) and value.ndim > 0)


def _index(value: Any) -> Any:
    """Returns the value itself, unless it has a slice that ends at a tensor."""
    if isinstance(value, slice):
        ends = value.start, value.stop, value.step
        return slice(*map(_number, ends)) if collect(ends, []) else value
    read = tuple(_index(v) if isinstance(v, slice) else v for v in value)
    return value if all(a is b for a, b in zip(read, value, strict=True)) else read


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.ndim else value
