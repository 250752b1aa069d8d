"""Samples from tensors of probabilities, means, deviations, rates and weights: bernoulli, normal,
poisson, multinomial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.dims import tensors_in
from ops.empty_pieces import zero_of
from ops.factors import Arg, Factors, Letter, LocalMaker, pointwise_factors
from ops.local import DrawProtocol, LocalCall
from ops.random.fill import drawn
from ops.registry import Function, rule


@drawn("invariant")
def draw_bernoulli(call: LocalCall, draw: DrawProtocol, input: Tensor, p: Any = None) -> Tensor:
    """Runs bernoulli(p) or bernoulli(input, p): 1 with probability p."""
    odds = input if p is None else p
    out: Tensor = draw.numbers("bernoulli", call.outputs[0], input.dtype, input.device, p=odds)
    return out + zero_of(input) if input.requires_grad else out


@drawn("invariant")
def draw_normal(call: LocalCall, draw: DrawProtocol, mean: Any, std: Any = 1.0) -> Tensor:
    """Runs normal(mean, std): standard numbers, scaled and shifted."""
    like = mean if isinstance(mean, Tensor) else std
    if bool((torch.as_tensor(std) < 0).any()):
        raise RuntimeError("normal expects all elements of std >= 0.0")
    wide = torch.float64 if not like.is_complex() else torch.complex128
    out: Tensor = draw.numbers("normal", call.outputs[0], wide, like.device).mul_(std).add_(mean)
    graded = [v for v in (mean, std) if isinstance(v, Tensor) and v.requires_grad]
    return out.detach().to(like.dtype) + zero_of(*graded) if graded else out.to(like.dtype)


@drawn("invariant")
def draw_poisson(call: LocalCall, draw: DrawProtocol, input: Tensor, none: Any = None) -> Tensor:
    """Runs poisson(rates): the quantile of a uniform number."""
    rates = input.detach().to(torch.float64)
    if not bool((rates >= 0).all()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    level = draw.numbers("uniform", call.outputs[0], torch.float64, input.device)
    out = quantile(level, rates).to(input.dtype)
    return out + zero_of(input) if input.requires_grad else out


def quantile(level: Tensor, rates: Tensor) -> Tensor:
    """Returns the smallest count k with P(count <= k) > level, of Poisson counts with these rates,
    by bisection. P(count <= k) is the regularized upper incomplete gamma function Q(k + 1,
    rate)."""
    below, above = -torch.ones_like(rates), (rates + 10 * rates.sqrt() + 40).floor()
    while bool((above - below > 1).any()):
        middle = ((below + above) / 2).floor()
        reached = torch.special.gammaincc(middle + 1, rates) > level
        below, above = below.where(reached, middle), above.where(~reached, middle)
    return above


def _elementwise(local: LocalMaker, *funcs: Function) -> None:
    @rule(*funcs, exact=True, floats=True, doc="elementwise")
    def factors(*args: Any, **kwargs: Any) -> Factors:
        return pointwise_factors(tensors_in(*args, *kwargs.values()), local=local)


_elementwise(draw_bernoulli, torch.bernoulli, Tensor.bernoulli)
_elementwise(draw_normal, torch.normal)
_elementwise(draw_poisson, torch.poisson)


# Choices ------------------------------------------------------------------------------------------


@drawn("invariant")
def draw_multinomial(
    call: LocalCall, draw: DrawProtocol, input: Tensor, num_samples: int, replacement: bool = False
) -> Tensor:
    """Returns column numbers drawn by rows of weights. Without replacement: the columns with the
    largest weight / exponential number (of all columns, by position). With replacement: the places
    of uniform numbers in the running sum of the weights."""
    check(input)
    wide = input.detach().to(torch.float64)
    if not replacement:
        race = draw.numbers("exponential", call.inputs[0], torch.float64, input.device)
        return (wide / race).topk(num_samples, dim=-1).indices
    edges = wide.cumsum(-1)
    total = edges[..., -1:]
    where = draw.numbers("uniform", call.outputs[0], torch.float64, input.device) * total
    where = torch.minimum(where, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(edges, where.contiguous(), right=True)


def check(weights: Tensor) -> None:
    """Raises RuntimeError for weights that torch.multinomial does not accept."""
    if not bool((weights >= 0).logical_and(weights < float("inf")).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not bool((weights.sum(-1) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


@rule(torch.multinomial, Tensor.multinomial, exact=True)
def multinomial(input: Arg, num_samples: int, replacement: bool = False, **kwargs: Any) -> Factors:
    """m n -> m s: rows pass through, all columns are needed"""
    if not input.dtype.is_floating_point:
        raise RuntimeError(
            f"multinomial: weights of a floating dtype are expected, not {input.dtype}"
        )
    if (
        not 1 <= input.ndim <= 2
        or num_samples < 1
        or (num_samples > input.shape[-1] and not replacement)
    ):
        raise RuntimeError(
            f"multinomial: {num_samples} samples {'with' if replacement else 'without'} "
            f"replacement of weights of shape {list(input.shape)}: weights have 1 or 2 dims, and "
            "as many columns as samples are taken without replacement"
        )
    rows = tuple(range(input.ndim - 1))
    sizes: dict[Letter, int] = {"s": num_samples}
    return Factors(
        ((*rows, "n"),), ((*rows, "s"),), sizes, unsplittable={"n", "s"}, local=draw_multinomial
    )
