"""Differentiable collectives on plain tensors: psum, pvary and all_gather.

A value that all ranks of a group have is *shared* while all compute the same from it: its gradient
is the whole one on each rank. ``pvary`` it before a rank uses it together with its own piece: each
rank then has a contribution to the gradient, and the backward adds them up. psum and pvary are each
other's backward, so are all_gather and taking one's own: right to every order of differentiation.

``group``: None where there is one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm import collectives

Tensor = torch.Tensor
Group = collectives.Group


def psum(x: Tensor, group: Group | None) -> Tensor:
    """P(sum) -> R: the sum over the ranks, shared."""
    if group is None:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return Psum.apply(x, group)
    return collectives.all_reduce(x, "sum", group)


def pvary(x: Tensor, group: Group | None) -> Tensor:
    """A shared value, for uses that vary from rank to rank."""
    return Pvary.apply(x, group) if group is not None and x.requires_grad else x


def all_gather(x: Tensor, group: Group | None) -> Tensor:
    """[n, *x.shape]: every rank's x, shared. All x have one shape."""
    if group is None:
        return x.unsqueeze(0)
    if x.requires_grad and torch.is_grad_enabled():
        return AllGather.apply(x, group)
    return collectives.all_gather(x, group)


class Psum(torch.autograd.Function):
    """P(sum) -> R over a group; backward: the gradient is the whole one already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Pvary.apply(grad, ctx.group), None


class Pvary(torch.autograd.Function):
    """The same value, read by uses that vary; backward: their contributions are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        activation_checkpoint.join_region(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        activation_checkpoint.recompute_region(ctx)
        return Psum.apply(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """Every rank's x; backward: the gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return TakeOwn.apply(grad, ctx.group), None


class TakeOwn(torch.autograd.Function):
    """This rank's of what all ranks have; backward: the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        activation_checkpoint.join_region(ctx)
        return x[group.index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        activation_checkpoint.recompute_region(ctx)
        return AllGather.apply(grad, ctx.group), None
