"""Elementwise functions of three tensors, and of a tensor with a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.dims import tensors_in
from ops.factors import Arg, Factors, Terms, pointwise_factors
from ops.infer import NoRule
from ops.pointwise.elementwise import each, enter, operands
from ops.registry import Rule, rule


def ternary(name: str, arguments: str, terms: Callable[[Any, Any, Any], Terms | None]) -> None:
    """Registers an elementwise function of three arguments; ``terms`` gets them in order."""
    names = arguments.split()

    def factors(*args: Any, **kwargs: Any) -> Factors:
        x, y, z = operands(args, kwargs, *names)
        tensors = tensors_in(*args, *kwargs.values())
        return pointwise_factors(tensors, linear_terms=terms(x, y, z) or ())

    pattern = "elementwise, a sum of products"
    enter(name, Rule(name, factors, numbers="type", pattern=pattern, sizes="letters"))


ternary("addcmul", "input tensor1 tensor2", lambda x, y, z: each(x, (y, z)))
ternary("lerp", "input end weight", lambda x, end, weight: each(x, end))


@rule(torch.where, exact=True, numbers="type")
def where(condition: Any, input: Any = None, other: Any = None) -> Factors:
    """elementwise; linear in both choices together"""
    if input is None or other is None:
        raise NoRule("where(condition) is nonzero: its shape depends on data")
    tensors = tensors_in(condition, input, other)
    return pointwise_factors(tensors, linear_terms=each(input, other) or ())


@rule(torch.Tensor.where, exact=True, numbers="type")
def tensor_where(input: Any, condition: Any, other: Any) -> Factors:
    """elementwise; linear in both choices together"""
    tensors = tensors_in(input, condition, other)
    return pointwise_factors(tensors, linear_terms=each(input, other) or ())


@rule(torch.prelu)
def prelu(input: Arg, weight: Arg) -> Factors:
    """n c ..., c -> n c ...: a weight for each channel, or one for all"""
    dims = tuple(range(input.ndim))
    channel = 1 if input.ndim > 1 and weight.numel() > 1 else None
    return Factors((dims, (channel,) * weight.ndim), (dims,), dict(enumerate(input.shape)))
