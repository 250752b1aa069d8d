"""Functions that make a tensor like another one: only its shape, dtype and layout matter.

The result of ``*_like`` has the layout of the tensor, without pending reductions (ones_like of a
P(sum) is replicated). The result of ``new_*`` has its own shape and is replicated; if the shape is
the tensor's, it has the tensor's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.dims import letters_of, numbers
from ops.factors import Arg, Dims, Factors, NoRule, pointwise_factors
from ops.registry import rule

INPUT = frozenset({0})


@rule(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, integers=False,
      sizes="letters")  # fmt: skip
def like(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """lies as the input"""
    return pointwise_factors([input], metadata_only=INPUT)


def new(input: Arg, shape: tuple[int, ...], local: Callable[[Any], Any] | None) -> Factors:
    """Returns the factors of a new tensor: the layout of the input if the shape is the same, else
    replicated."""
    if shape == input.shape:
        return pointwise_factors([input], metadata_only=INPUT, local=local)
    return replicated(input, shape).replace(local=local)


def replicated(input: Arg, shape: tuple[int, ...]) -> Factors:
    """Returns the factors of a new tensor that is replicated."""
    out: Dims = (None,) * len(shape)
    return Factors((letters_of(input),), (out,), shapes=(shape,), metadata_only=INPUT)


def made(call: Any) -> Callable[..., Any]:
    """Returns the same function with the local shape: one argument of new_full, all arguments of
    the other functions."""
    func = torch.Tensor.new_empty if call.func is torch.Tensor.new else call.func
    shape, fills = call.outputs[0].local_shape, func is torch.Tensor.new_full

    def run(input: Any, *args: Any, **options: Any) -> Any:
        return func(input, shape, *(args[1:] if fills else ()), **options)

    return run


@rule(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, exact=True)
def new_zeros(input: Arg, *sizes: Any, **kwargs: Any) -> Factors:
    """replicated, or as the input where the shape is the same"""
    return new(input, numbers(sizes), made)


@rule(torch.Tensor.new_full, exact=True)
def new_full(input: Arg, size: Any, fill_value: Any, **kwargs: Any) -> Factors:
    """replicated, or as the input where the shape is the same"""
    if isinstance(fill_value, Arg):
        raise NoRule("a fill_value that is a tensor")
    return new(input, numbers((size,)), made)


@rule(torch.Tensor.new_tensor, exact=True)
def new_tensor(input: Arg, data: Any, **kwargs: Any) -> Factors:
    """replicated: the data are the whole value on every rank"""
    if _holds_tensor(data):
        raise NoRule("data that are or hold a tensor")
    shape = tuple(torch.as_tensor(data).shape)
    return replicated(input, shape)


def _holds_tensor(data: Any) -> bool:
    parts = data if isinstance(data, (list, tuple)) else ()
    return isinstance(data, Arg) or any(map(_holds_tensor, parts))


@rule(torch.Tensor.new, exact=True)
def new_of_old(input: Arg, *size: Any, **kwargs: Any) -> Factors:
    """new(2, 3): as new_empty; new([1., 2.]): as new_tensor"""
    data = size[0] if size else None
    if isinstance(data, (list, tuple)) and not isinstance(data, torch.Size):
        return new_tensor(input, data)
    return new(input, numbers(size or (0,)), made)
