"""What local functions that communicate are made of: ``total``, ``spread``, ``collect``, ``pick``.

Gradient types (design, section 3) of a value inside such a function: one that all ranks of the axes
have is *shared* while all compute the same from it (its gradient is the whole one on each rank);
``spread`` it before a rank uses it together with its own piece (each then has a contribution, and
the backward adds them up). ``total`` and ``spread`` are each other's backward, so are ``collect``
and taking one's own: right to every order.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.layout import Axes
from ops.local import Call, Reach

Tensor = torch.Tensor


def total(call: Call, x: Tensor, axes: Axes) -> Tensor:
    """The sum over the ranks of the axes, shared. Gradient: the same on each rank."""
    return call.reach.all_reduce(x, "sum", axes)


def spread(call: Call, x: Tensor, axes: Axes) -> Tensor:
    """A shared value as one that each rank uses with its own piece. Backward: the contributions'
    sum."""
    return _Spread.apply(x, call.reach, axes) if axes and x.requires_grad else x


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Reach, axes: Axes) -> Tensor:
        ctx.reach, ctx.axes = reach, axes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.reach.all_reduce(grad, "sum", ctx.axes), None, None


def collect(call: Call, x: Tensor, axes: Axes) -> Tensor:
    """[n, *x.shape]: every rank's x, shared; all x have one shape. Backward: one's own."""
    if not axes:
        return x[None]
    return (
        _Collect.apply(x, call.reach, axes, _place(call, axes))
        if x.requires_grad
        else call.reach.all_gather(x, axes)
    )


def _place(call: Call, axes: Axes) -> int:
    """This rank's number among the ranks of the axes (major first)."""
    place = 0
    for a in axes:
        place = place * call.mesh_shape[a] + call.coordinate[a]
    return place


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Reach, axes: Axes, place: int) -> Tensor:
        ctx.with_ = reach, axes, place
        return reach.all_gather(x, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Own.apply(grad, *ctx.with_), None, None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Reach, axes: Axes, place: int) -> Tensor:
        ctx.with_ = reach, axes, place
        return x[place].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Collect.apply(grad, *ctx.with_), None, None, None


def pick(call: Call, mine: Tensor, best: Tensor, won: Tensor, axes: Axes) -> Tensor:
    """``best`` (known to all, shared), as the value of ``mine`` where ``won``: the gradient goes
    there alone."""
    return _Pick.apply(mine, best, won, call, axes) if mine.requires_grad else best


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, best: Tensor, won: Tensor, call: Call, axes: Axes
    ) -> Tensor:
        ctx.save_for_backward(won)
        ctx.with_ = call, axes
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (won,) = ctx.saved_tensors
        return torch.where(won, spread(ctx.with_[0], grad, ctx.with_[1]), 0), None, None, None, None
