"""Imports every family of rules, so that the table is full."""

from ops import (
    casts,
    einsum,
    factory,
    foreach,
    foreach_reduce,
    matmul,
    optim,
    pointwise,
    reduce,
    ternary,
    view,
)

__all__ = [
    "casts",
    "einsum",
    "factory",
    "foreach",
    "foreach_reduce",
    "matmul",
    "optim",
    "pointwise",
    "reduce",
    "ternary",
    "view",
]
