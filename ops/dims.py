"""Helpers that rules share: functions by name, dims from the front, letters; and shapes of results
from the function itself, run on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from disttensor.pytree import collect
from ops.check_call import shared_without_data
from ops.empty_pieces import padded_if_empty
from ops.factors import Arg, Dims, Factors, Letter, NoRule, Terms, pointwise_factors
from ops.registry import Function, functions_named

# The arguments in which a function is linear (``Factors.linear_terms``), by number of the tensor
FIRST: Terms = (frozenset({0}),)
SECOND: Terms = (frozenset({1}),)
SUM: Terms = (*FIRST, *SECOND)  # in both arguments together
PRODUCT: Terms = (frozenset({0, 1}),)  # in each of the two arguments


def named(*names: str, places: tuple[Any, ...] = (torch, torch.Tensor)) -> list[Function]:
    """Returns the functions of these names in torch and of Tensor, without in-place forms."""
    found = (pair for name in names for pair in functions_named(name, places))
    return list(dict.fromkeys(func for func, inplace in found if not inplace))


def front(dim: int, ndim: int) -> int:
    """Returns ``dim`` counted from the front. Raises IndexError, as torch does."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(ndim, 1)}, "
            f"{max(ndim, 1) - 1}], but got {dim})"
        )
    return dim % max(ndim, 1)


def fronts(dims: Any, ndim: int) -> tuple[int, ...]:
    """Returns one or several dims, counted from the front."""
    return tuple(front(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims))


def numbers(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns sizes or dims as a tuple; the caller gave them one by one, or as one sequence."""
    if len(args) == 1 and not isinstance(args[0], int):
        args = tuple(args[0])
    return tuple(int(a) for a in args)


def tuple_of(value: Any, n: int) -> tuple[int, ...]:
    """Repeats a number, or a list of one number, n times."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * (n if len(value) == 1 else 1)


def letters_of(input: Arg) -> tuple[int, ...]:
    """Returns a letter for each dim: its number."""
    return tuple(range(len(input.shape)))


def moved(input: Arg, out: Dims, sizes: dict[Letter, int] | None = None, **options: Any) -> Factors:
    """Returns the factors of a function that only moves elements, with letters 0, 1, ...: any
    Partial passes through."""
    known: dict[Letter, int] = dict(enumerate(input.shape))
    known.update(sizes or {})
    options.setdefault("moves", True)
    return Factors((letters_of(input),), (out,), known, **options)


def tensors_in(*values: Any) -> list[Arg]:
    """Returns the tensors among the values and in lists of them, in order."""
    return collect(values, [], Arg)


def replaced(input: Arg, dim: int, *new: Letter) -> Dims:
    """Returns the letters of a tensor with others in place of ``dim``."""
    dims = letters_of(input)
    return (*dims[:dim], *new, *dims[dim + 1 :])


def without(input: Arg, gone: Iterable[int]) -> Dims:
    """Returns the letters of a tensor in which the dims ``gone`` are whole."""
    gone = set(gone)
    return tuple(None if d in gone else d for d in range(input.ndim))


# Results of the function itself -------------------------------------------------------------------


def results_of(func: Function, args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the results. Raises torch's errors, and NoRule if the function cannot
    run on tensors without data."""
    found = shared_without_data(func, args, kwargs)
    if found is None:
        raise NoRule(f"{getattr(func, '__name__', func)} does not run without data")
    return found.shapes


def batched_factors(
    func: Function, args: Any, kwargs: Any, tensors: list[Arg], cores: list[int], **options: Any
) -> Factors:
    """Returns the factors of a function whose leading dims broadcast, and lead every result.
    ``cores[i]``: the number of last dims of tensor i, which are whole."""
    leads = [t.shape[: t.ndim - core] for t, core in zip(tensors, cores, strict=True)]
    if any(t.ndim < core for t, core in zip(tensors, cores, strict=True)):
        raise NoRule(f"too few dims for {getattr(func, '__name__', func)}")
    f = pointwise_factors([Arg(lead) for lead in leads])
    n = len(f.outputs[0])
    inputs = ((*dims, *[None] * core) for dims, core in zip(f.inputs, cores, strict=True))
    shapes = results_of(func, args, kwargs)
    if any(shape[:n] != tuple(f.sizes.values()) for shape in shapes):
        raise NoRule("a result without the leading dims")
    outputs = tuple((*range(n), *[None] * (len(shape) - n)) for shape in shapes)
    return Factors(tuple(inputs), outputs, f.sizes, shapes=shapes, **options)


def shaped(
    func: Function, args: Any, kwargs: Any, ins: Sequence[Dims], out: Dims, **options: Any
) -> Factors:
    """Returns the factors of ``func`` with these letters; a dim with None is whole. All results
    have the letters ``out``."""
    shapes = results_of(func, args, kwargs)
    options.setdefault("local", padded_if_empty)
    return Factors(tuple(ins), (out,) * len(shapes), shapes=shapes, **options)
