"""Imports every family of rules, so that the table is full."""

from ops import matmul, pointwise, reduce, view

__all__ = ["matmul", "pointwise", "reduce", "view"]
