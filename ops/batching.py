"""Functions of the last dims, one for each index of the dims before: these are split, the last dims
stay whole.

Shapes of results come from the function itself, run on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.dims import named
from ops.empty_pieces import is_empty, zero_of
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.local import Call
from ops.registry import Function, Rule, register


def results_of(func: Function, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes of the results. Raises NoRule where the function does not say, or refuses the
    arguments."""

    def meta(value: Any) -> Any:
        if isinstance(value, Arg):
            return torch.empty(value.shape, dtype=value.dtype or torch.float32, device="meta")
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    try:
        out = func(*[meta(a) for a in args], **{k: meta(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise NoRule(f"{getattr(func, '__name__', func)}: {error}") from None
    found = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
    return [tuple(t.shape) for t in found]


def batched_factors(
    func: Function, args: Any, kwargs: Any, tensors: list[Arg], cores: list[int], **options: Any
) -> Factors:
    """``cores[i]``: how many last dims of tensor i stay whole. Those before broadcast, and lead
    every result."""
    leads = [t.shape[: t.ndim - core] for t, core in zip(tensors, cores, strict=True)]
    if any(t.ndim < core for t, core in zip(tensors, cores, strict=True)):
        raise NoRule(f"too few dims for {getattr(func, '__name__', func)}")
    n = max(map(len, leads))
    sizes: dict[Any, int] = {}
    inputs = []
    for t, lead in zip(tensors, leads, strict=True):
        letters: list[Any] = []
        for i, s in enumerate(lead, n - len(lead)):
            if s != 1 and sizes.setdefault(i, s) != s:
                raise NoRule("leading dims that do not broadcast")
            letters.append(None if s == 1 else i)
        inputs.append((*letters, *[None] * (t.ndim - len(lead))))
    shapes = results_of(func, args, kwargs)
    outputs = []
    for shape in shapes:
        if shape[:n] != tuple(sizes.get(i, 1) for i in range(n)):
            raise NoRule("a result without the leading dims")
        outputs.append((*[i if i in sizes else None for i in range(n)], *[None] * (len(shape) - n)))
    return Factors(tuple(inputs), tuple(outputs), sizes, shapes=tuple(shapes), **options)


def or_zero(call: Call) -> Any:
    """The torch function; on a rank with nothing zeros of the results' shapes, in the types that it
    gives."""
    if not is_empty(call):
        return call.func

    def zeros(*args: Any, **kwargs: Any) -> Any:
        pieces = iter(call.inputs)

        def whole(value: Any) -> Any:
            if isinstance(value, Tensor):
                made = torch.empty(next(pieces).shape, dtype=value.dtype, device="meta")
                return made.requires_grad_(value.requires_grad)
            return type(value)(map(whole, value)) if type(value) in (list, tuple) else value

        wholes = [whole(a) for a in args], {k: whole(v) for k, v in kwargs.items()}
        given = call.func(*wholes[0], **wholes[1])
        zero = zero_of(*args, *kwargs.values())
        made = []
        for t, piece in zip(
            [given] if isinstance(given, Tensor) else given, call.outputs, strict=True
        ):
            one = zero if t.requires_grad else zero.detach()
            made.append(one.to(t.dtype).expand(piece.local_shape).clone())
        return made[0] if isinstance(given, Tensor) else type(given)(made)

    return zeros


def _enter(
    names: str,
    cores: Callable[[list[Arg]], list[int]],
    places: tuple[Any, ...] = (torch, torch.linalg, Tensor),
) -> None:
    """A rule for each of the functions of these names, in torch, torch.linalg and of Tensor. One
    that refuses a matrix (not positive definite, singular) does so on the rank that has it."""
    funcs = named(*names.split(), places=places)
    for func in funcs:

        def factors(*args: Any, _func: Function = func, **kwargs: Any) -> Factors:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
            return batched_factors(_func, args, kwargs, tensors, cores(tensors))

        rule = Rule(func.__name__, factors, False, "value", True, "... m n -> ...: batch dims pass")
        register(rule, func, exact=True)


def matrices(tensors: list[Arg]) -> list[int]:
    return [2] * len(tensors)


def solves(tensors: list[Arg]) -> list[int]:
    """A and B, which is a batch of vectors where it has A's shape without the last dim."""
    if len(tensors) == 2:
        a, b = tensors
        if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
            return [2, 1]
    return matrices(tensors)


def with_vector(tensors: list[Arg]) -> list[int]:
    """The second is a vector for each matrix: pivots, factors of reflections."""
    return [2, 1, 2][: len(tensors)]


def pivots_last(tensors: list[Arg]) -> list[int]:
    """Right sides, factors, and a vector of pivots for each matrix."""
    return [2, 2, 1]


_enter(
    "cholesky cholesky_ex cholesky_inverse cholesky_solve det slogdet logdet inv inv_ex inverse "
    "eig eigvals eigh eigvalsh qr svd svdvals lu_factor lu_factor_ex ldl_factor ldl_factor_ex "
    "matrix_exp matrix_power geqrf solve_triangular triangular_solve",
    matrices,
)
_enter("solve solve_ex", solves)
_enter("lu_solve", with_vector, (torch.linalg,))
_enter("lu_solve", pivots_last, (torch, Tensor))
_enter("ldl_solve lu_unpack householder_product ormqr", with_vector)
