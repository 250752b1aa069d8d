"""Results whose backward comes by the same arguments on every rank, whatever their code did."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd.graph import node_of, nodes_of


class Tie(torch.autograd.Function):
    """The results as they are. Backward: where one has a gradient all have, and so have ``more``:
    zeros."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        ctx.more = [(t.shape, t.dtype, t.device) for t in tensors[count:]]
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=d) for shape, dtype, d in ctx.more]
        return None, *grads, *zeros


def tied(pieces: list[Any], given: list[torch.Tensor]) -> list[Any]:
    """Results whose backward comes by the same arguments on every rank, whatever fn did with its
    piece on this one: what is communicated for an argument's gradient must not depend on the data.
    What fn did not use gets zeros."""
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
    apart = [x for x, node in zip(wanting, nodes, strict=True) if node not in found]
    if not apart and len(places) == 1:
        return pieces
    made = Tie.apply(len(places), *[pieces[i] for i in places], *apart)
    for i, p in zip(places, made, strict=True):
        pieces[i] = p
    return pieces
