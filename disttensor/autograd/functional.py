"""Differentiable collectives on regular tensors: psum, pvary and all_gather.

A value that all ranks of a group have is *shared* while all compute the same from it: its gradient
is whole on each rank. Call ``pvary`` on it before a rank uses it together with its own piece: each
rank then has a contribution to the gradient, and the backward sums them. The backward of psum is
pvary, and the other way round; all_gather is paired with taking one's own piece. So gradients of
every order are right.

``group``: None for a single rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm import collectives
from disttensor.comm.groups import Group

Tensor = torch.Tensor


def psum(x: Tensor, group: Group | None) -> Tensor:
    """Maps P(sum) to R: returns the sum over the ranks, shared."""
    return x if group is None else _applied("psum", x, group)


def pvary(x: Tensor, group: Group | None) -> Tensor:
    """Returns a shared value for uses that vary from rank to rank."""
    return Paired.apply("pvary", x, group) if group is not None and x.requires_grad else x


def all_gather(x: Tensor, group: Group | None) -> Tensor:
    """Returns [n, *x.shape]: every rank's x, shared. All x have one shape."""
    return x.unsqueeze(0) if group is None else _applied("all_gather", x, group)


# name -> (the function, the name of its backward)
_PAIRS: dict[str, tuple[Callable[[Tensor, Group], Tensor], str]] = {
    "psum": (lambda x, group: collectives.all_reduce(x, "sum", group), "pvary"),
    "pvary": (lambda x, group: x.view_as(x), "psum"),
    "all_gather": (lambda x, group: collectives.all_gather(x, group), "take_own"),
    "take_own": (lambda x, group: x[group.index].clone(), "all_gather"),
}
_SILENT = ("pvary", "take_own")  # only their backward communicates


def _applied(name: str, x: Tensor, group: Group) -> Tensor:
    graph = x.requires_grad and torch.is_grad_enabled()
    return Paired.apply(name, x, group) if graph else _PAIRS[name][0](x, group)


class Paired(torch.autograd.Function):
    """A function of ``_PAIRS``, whose backward is the other function of its pair."""

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
