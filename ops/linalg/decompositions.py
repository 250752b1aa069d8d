"""Decompositions, inverses and solvers of the last two dims: the batch dims pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.dims import batched_factors, named, tensors_in
from ops.empty_pieces import padded_if_empty, zeros_if_empty
from ops.factors import Arg, Factors, NoRule
from ops.registry import Function, rule


def _enter(
    names: str,
    cores: Callable[[list[Arg]], list[int]],
    places: tuple[Any, ...] = (torch, torch.linalg, Tensor),
    **options: Any,
) -> None:
    """Registers a rule for each of the functions of these names. ``cores`` returns how many last
    dims of each tensor stay whole. A function that refuses a matrix (not positive definite,
    singular) does so on the rank that has it."""
    for func in named(*names.split(), places=places):

        @rule(func, exact=True, floats=True, doc="... m n -> ...: batch dims pass")
        def factors(*args: Any, _func: Function = func, **kwargs: Any) -> Factors:
            tensors = tensors_in(*args, *kwargs.values())
            return batched_factors(_func, args, kwargs, tensors, cores(tensors), **options)


def _dims(*cores: int) -> Callable[[list[Arg]], list[int]]:
    return lambda tensors: [*cores[: len(tensors)]]


def _one_matrix(tensors: list[Arg]) -> list[int]:
    if len(tensors) > 1:
        raise NoRule("tolerances given by a tensor")
    return [2]


def _solves(tensors: list[Arg]) -> list[int]:
    """Returns the number of matrix dims of each tensor: B is a batch of vectors if it has one dim,
    or A's shape without the last dim."""
    if len(tensors) == 2:
        a, b = tensors
        if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
            return [2, 1]
    return [2] * len(tensors)


_enter(
    "cholesky cholesky_ex cholesky_inverse cholesky_solve inv inv_ex inverse "
    "eig eigvals eigh eigvalsh qr svd svdvals lu_factor lu_factor_ex ldl_factor ldl_factor_ex "
    "matrix_exp matrix_power geqrf solve_triangular triangular_solve",
    _dims(2, 2),
)
_enter("det slogdet logdet", _dims(2), local=padded_if_empty)
# padded: under autocast their dtype differs for tensors without data
_enter("pinverse", _one_matrix, (torch, Tensor), local=padded_if_empty)
_enter("pinv", _one_matrix, (torch.linalg,), local=padded_if_empty)
_enter("cond matrix_rank lu", _one_matrix, (torch.linalg,), local=zeros_if_empty)
_enter("solve solve_ex", _solves)
_enter("lu_solve", _dims(2, 1, 2), (torch.linalg,))  # factors, pivots, right sides
_enter("lu_solve", _dims(2, 2, 1), (torch, Tensor))
_enter("ldl_solve lu_unpack householder_product ormqr", _dims(2, 1, 2))
