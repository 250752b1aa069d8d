"""All forms of dropout. The mask is replicated on an axis on which the input is replicated or a
pending sum: with one mask, dropout is linear in its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from disttensor.checks import check_dropout
from disttensor.core.layout import Box
from ops.dims import FIRST
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import DrawProtocol, LocalCall, LocalPiece, LocalShardInfo
from ops.random.fill import drawing, drawn
from ops.registry import rule

LINEAR = torch.dropout, torch.dropout_, F.dropout, torch.feature_dropout, torch.feature_dropout_
AFFINE = (
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)  # fmt: skip
ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity


def alias(call: LocalCall) -> Callable[..., Any]:
    """Returns the input itself, as a tensor of its own in the graph."""

    def run(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        check_dropout(p)
        return input.view_as(input)

    return run


def masked(call: LocalCall) -> Callable[..., Any]:
    """Zeroes elements (or whole channels) with probability p, and scales the others so that the
    mean stays the same (with alpha: also the variance)."""
    name = call.func.__name__
    inplace, alpha, feature = name.endswith("_"), "alpha" in name, "feature" in name
    out = call.outputs[0]
    place = call.axes(0, 1) if feature else None
    if feature:  # one number for a channel
        n = len(out.shape) - 2
        offset, sizes = out.local_box
        box = Box((*offset[:2], *[0] * n), (*sizes[:2], *[1] * n))
        mask: LocalPiece | LocalShardInfo = LocalPiece((*out.shape[:2], *[1] * n), box)
    else:
        mask = out

    def by_position(draw: DrawProtocol, input: Tensor, p: float) -> Tensor:
        keep = draw.numbers("bernoulli", mask, input.dtype, input.device, p=1.0 - p)
        if not alpha:
            return _times(input, keep.div_(1.0 - p) if p < 1.0 else keep)
        a = 1.0 / math.sqrt((ALPHA * ALPHA * p + 1.0) * (1.0 - p)) if p < 1.0 else 0.0
        shift = (keep - 1.0).mul_(ALPHA * a).add_(ALPHA * a * p)
        kept = _times(input, keep.mul_(a))
        return kept.add_(shift) if inplace else kept + shift

    def _times(input: Tensor, noise: Tensor) -> Tensor:
        return input.mul_(noise) if inplace else input * noise

    core = getattr(torch, name)
    draws = drawing(call, "fast", by_position, place, lambda input, p: core(input, p, True))

    def run(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        check_dropout(p)
        result = input if p == 0.0 else draws(input, p)
        return result.view_as(result) if result is input and not inplace else result

    return run


def dropout(linear: bool, default: bool = True) -> Callable[..., Factors]:
    """Returns the rule of a dropout. ``default``: of ``training``, if the function has one."""

    def factors(
        input: Arg, p: float = 0.5, training: bool = default, inplace: bool = False
    ) -> Factors:
        """elementwise; a pending sum passes through unless alpha"""
        if inplace:
            raise NoRule("inplace=True is the function with _ at its end")
        if not training:
            return pointwise_factors([input], moves=True, local=alias)
        return pointwise_factors([input], linear_terms=FIRST if linear else (), local=masked)

    return factors


rule(*LINEAR, exact=True, doc="elementwise")(dropout(linear=True))
rule(*AFFINE, exact=True, doc="elementwise")(dropout(linear=False))
rule(F.alpha_dropout, exact=True, doc="elementwise")(dropout(linear=False, default=False))


def with_mask(call: LocalCall) -> Callable[..., Any]:
    """Runs native_dropout: the result and the mask."""

    def by_position(draw: DrawProtocol, input: Tensor, p: float, train: Any = True) -> Any:
        keep = draw.numbers("bernoulli", call.outputs[0], torch.bool, input.device, p=1.0 - p)
        return input * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0), keep

    def fast(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # of an empty tensor torch returns the tensor itself, which must not be a leaf
        out, keep = torch.native_dropout(input.view_as(input), *args, **kwargs)
        return out, keep.bool()  # of an empty tensor torch returns floats

    return drawing(call, "fast", by_position, func=fast)


@rule(torch.native_dropout, exact=True, floats=True)
def native_dropout(input: Arg, p: float, train: Any = True) -> Factors:
    """elementwise, two results"""
    local = with_mask if train or train is None else None
    return pointwise_factors([input], 2, local=local)


# Leaky ReLU with a random slope -------------------------------------------------------------------


@drawn("fast")
def multiply_negative(
    call: LocalCall, draw: DrawProtocol, input: Tensor, lower: float = 0.125, upper: float = 1 / 3,
    training: bool = False, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Multiplies each element below zero by its own random number from [lower, upper)."""
    bounds = {"low": lower, "high": upper}
    slope = draw.numbers("uniform", call.outputs[0], input.dtype, input.device, **bounds)
    slope.masked_fill_(input.detach() > 0, 1.0)
    return input.mul_(slope) if call.func is torch.rrelu_ else input * slope


@rule(F.rrelu, torch.rrelu, torch.rrelu_, exact=True, floats=True)
def rrelu(
    input: Arg, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False, generator: Any = None,
) -> Factors:  # fmt: skip
    """elementwise"""
    if inplace:
        raise NoRule("inplace=True is the function with _ at its end")
    return pointwise_factors([input], local=multiply_negative if training else None)
