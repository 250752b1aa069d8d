"""Differentiable collectives on plain tensors: psum, pvary and all_gather.

A value that all ranks of a group have is *shared* while all compute the same from it: its gradient
is the whole one on each rank. ``pvary`` it before a rank uses it together with its own piece: each
rank then has a contribution to the gradient, and the backward adds them up. psum and pvary are each
other's backward, so are all_gather and taking one's own: right to every order of differentiation.

``group``: None where there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm import collectives

Tensor = torch.Tensor
Group = collectives.Group


def psum(x: Tensor, group: Group | None) -> Tensor:
    """P(sum) -> R: the sum over the ranks, shared."""
    return x if group is None else _applied("psum", x, group)


def pvary(x: Tensor, group: Group | None) -> Tensor:
    """A shared value, for uses that vary from rank to rank."""
    return Paired.apply("pvary", x, group) if group is not None and x.requires_grad else x


def all_gather(x: Tensor, group: Group | None) -> Tensor:
    """[n, *x.shape]: every rank's x, shared. All x have one shape."""
    return x.unsqueeze(0) if group is None else _applied("all_gather", x, group)


# name -> (the function, the name of its backward)
_PAIRS: dict[str, tuple[Callable[[Tensor, Group], Tensor], str]] = {
    "psum": (lambda x, group: collectives.all_reduce(x, "sum", group), "pvary"),
    "pvary": (lambda x, group: x.view_as(x), "psum"),
    "all_gather": (lambda x, group: collectives.all_gather(x, group), "take_own"),
    "take_own": (lambda x, group: x[group.index].clone(), "all_gather"),
}
_SILENT = ("pvary", "take_own")  # these send nothing, and their backward does


def _applied(name: str, x: Tensor, group: Group) -> Tensor:
    graph = x.requires_grad and torch.is_grad_enabled()
    return Paired.apply(name, x, group) if graph else _PAIRS[name][0](x, group)


class Paired(torch.autograd.Function):
    """A function of ``_PAIRS``, whose backward is the other one of its pair."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, group: Group) -> Tensor:
        ctx.with_ = name, group
        if name in _SILENT:
            activation_checkpoint.join_region(ctx)
        return _PAIRS[name][0](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        name, group = ctx.with_
        if name in _SILENT:
            activation_checkpoint.recompute_region(ctx)
        return None, Paired.apply(_PAIRS[name][1], grad, group), None
