"""Ties results to all arguments, so that backward visits the same arguments on every rank, and
gradients to their arguments, so that they have a graph on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttensor.graph_nodes import node_of, nodes_of


class TieOutputs(torch.autograd.Function):
    """Returns the results unchanged. Backward: if one has a gradient, all have one, and ``more``
    get zeros, whose graph reaches the gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        ctx.more = [(t.shape, t.dtype, t.device) for t in tensors[count:]]
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=d) for shape, dtype, d in ctx.more]
        if torch.is_grad_enabled():
            zeros = [zero + grads[0].reshape(-1)[:0].sum().to(zero.dtype) for zero in zeros]
        return None, *grads, *zeros


class _TieGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, other: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.save_for_backward(other, *tensors)
        return tuple([t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            grads = TieOutputs.apply(len(grads), *grads, *ctx.saved_tensors)
        return None, *grads


def tie_grads(tensors: Sequence[torch.Tensor], other: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors. Their gradients, if they are differentiated again, have a graph that
    reaches all of them and ``other``, also on a rank that does not use them."""
    made = [t for t in tensors if t.requires_grad]
    if not made or not torch.is_grad_enabled():
        return list(tensors)
    tied = iter(_TieGrads.apply(other, *made))
    return [next(tied) if t.requires_grad else t for t in tensors]


def tie_outputs(pieces: list[Any], given: list[torch.Tensor]) -> list[Any]:
    """Ties results to all inputs, so that backward visits the same inputs on every rank, even if a
    rank's fn did not use one: the communication for gradients must not depend on data. Unused
    inputs receive zeros."""
    places = [
        i
        for i, p in enumerate(pieces)
        if isinstance(p, torch.Tensor) and (p.is_floating_point() or p.is_complex())
    ]
    wanting = [x for x in given if x.requires_grad]
    if not places or not wanting:
        return pieces
    nodes = [node_of(x) for x in wanting]
    found = nodes_of([pieces[i] for i in places], set(nodes))
    unused = [x for x, node in zip(wanting, nodes, strict=True) if node not in found]
    if not unused and len(places) == 1:
        return pieces
    made = TieOutputs.apply(len(places), *[pieces[i] for i in places], *unused)
    for i, p in zip(places, made, strict=True):
        pieces[i] = p
    return pieces
