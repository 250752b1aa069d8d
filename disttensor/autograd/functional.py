"""Differentiable collectives on plain tensors: psum and pvary are each other's backward.

Both are linear, and right to every order of differentiation.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd import recompute
from disttensor.comm import collectives

Tensor = torch.Tensor


class Psum(torch.autograd.Function):
    """P(sum) -> R over a group; backward: the gradient is the whole one already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: collectives.Group) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Pvary.apply(grad, ctx.group), None


class Pvary(torch.autograd.Function):
    """The same value, read by uses that vary; backward: their contributions are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: collectives.Group) -> Tensor:
        ctx.group = group
        recompute.hold(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        recompute.redo(ctx)
        return Psum.apply(grad, ctx.group), None
