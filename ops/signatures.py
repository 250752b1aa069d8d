"""The one form of a call, by torch's own signatures: arguments by position up to the first gap, the
others by torch's names in torch's order; and numbers in place of 0-d tensors and NumPy's integers.

Rules and local functions receive this form only. So their parameters may have any names, but for
parameters that may follow a gap: they have torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import Parameter, signature, unwrap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disttensor.pytree import collect, substitute
from disttensor.torch_private import schemas_named

Function = Callable[..., Any]

# The names of numpy arguments that torch's parser accepts in addition to its own.
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input",
          "x2": "other"}  # fmt: skip
_SIMPLE = (int, float, bool, str, type(None))
_OTHER_INDICES = (int, np.ndarray, torch.SymInt)  # they have __index__, and stay
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
    names = {a.name: a.name for a in given}
    if given and str(given[0].type) == "Tensor" and given[0].name == "self":
        names["self"] = "input"
    last = {a.name for a in given if a.kwarg_only or a.name == "memory_format"}  # as the parser
    words = [names[a.name] for a in given if a.name in last]
    if "pin_memory" in words:  # of a factory, which torch's parser gives one more
        words.append("requires_grad")
    return Signature(
        tuple(names[a.name] for a in given if a.name not in last),
        tuple(words),
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


class Form(NamedTuple):
    """A call in its one form. ``order``: for each of its arguments (positional, then named) its
    number among the arguments of the caller; None: the caller used this form."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    order: tuple[int, ...] | None = None


def form_of(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Form:
    """Returns the one form of a call."""
    said = chosen(func, args, kwargs) if kwargs else None
    if said is None:
        return Form(args, kwargs)
    numbers = {said.named(name): i for i, name in enumerate(kwargs, len(args))}
    order = [*range(len(args))]
    for name in said.names[len(args) :]:
        if name not in numbers:
            break
        order.append(numbers.pop(name))
    n, words = len(order), [name for name in (*said.names, *said.words) if name in numbers]
    if words == [*kwargs]:
        return Form(args, kwargs)
    order += [numbers[name] for name in words]
    values = (*args, *kwargs.values())
    given = [values[i] for i in order]
    return Form(given[:n], dict(zip(words, given[n:], strict=True)), tuple(order))


# Numbers ------------------------------------------------------------------------------------------


def read_numbers(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns the call with ints in place of NumPy's integers, and numbers in place of 0-d tensors
    where torch takes no tensor (a size, a dim, an end of a slice). Returns None if it has none."""
    if all(map(_stays, args)) and all(map(_stays, kwargs.values())):
        return None  # most calls need no signature of torch

    def read(at: int | str, value: Any) -> Any:
        value = _integers(value)
        if at == "out" or all(t.ndim for t in collect(value, [])):
            return value  # most values need no signature of torch
        every = signatures(func)
        ways = [s for s in every if s.fits(len(args), [*kwargs])] or every
        taken = not ways or any(s.tensor_at(at) for s in ways)
        return value if taken else substitute(value, _number)

    placed = [read(i, v) for i, v in enumerate(args)]
    named = {k: read(k, v) for k, v in kwargs.items()}
    pairs = zip((*args, *kwargs.values()), (*placed, *named.values()), strict=True)
    return None if all(a is b for a, b in pairs) else (placed, named)


def _stays(value: Any) -> bool:
    """Returns True if the value is used unchanged at any position: it is no 0-d tensor or integer
    of another class, and cannot hold one."""
    return type(value) in _SIMPLE or (isinstance(value, Tensor) and value.ndim > 0)


def _integers(value: Any) -> Any:
    """Returns a value with ints in place of other integers, and in slices also of 0-d tensors; the
    value itself if it has none."""
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, Tensor):
        return value
    if kind is slice:
        ends = value.start, value.stop, value.step
        found: Any = [_number(_integers(end)) for end in ends]
        return value if _same(found, ends) else slice(*found)
    if kind is list or kind is tuple:
        found = [_integers(v) for v in value]
        return value if _same(found, value) else kind(found)
    if hasattr(kind, "__index__") and not isinstance(value, _OTHER_INDICES):
        return operator.index(value)
    return value


def _same(found: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(found, values, strict=True))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.ndim else value
