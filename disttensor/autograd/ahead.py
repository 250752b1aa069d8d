"""A reduction of the backward starts when its input is complete, and is waited for later.

    x -> ReshardFunction -> Ahead -> uses of x, as products with weights   (backward: to the left)

A backward reaches ``Ahead`` when the gradient of all uses is complete, and starts its reduction; at
``ReshardFunction`` (``disttensor.autograd.grad_types``) it waits for the result. Autograd runs the
ready node with the highest number, and a new node has the next number. So a few numbers are left
out between the two, the *room*. The gradient of a weight takes one of them
(``ops.linalg.beside``), and is computed while the reduction runs.

Numbers stay unique, and the inputs of a node have lower numbers than the node. So a backward runs
the nodes of the program in one order, the same on all ranks, whatever a rank's piece is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm.work import Work
from disttensor.torch_private import current_backward, direct_apply, node_number

Tensor = torch.Tensor
Begin = Callable[[Tensor], Work[Tensor]]
Begun = dict[int, Work[Tensor]]  # by the number of the backward

ROOM = 4  # q, k and v, or gate and up, and one more


class Ahead(torch.autograd.Function):
    """The identity; its backward starts the reduction that the ``ReshardFunction`` before it
    waits for.

    If the gradient will be differentiated again, only ``ReshardFunction`` reduces.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Begin, begun: Begun, first: int) -> Tensor:
        ctx.begin, ctx.begun = begin, begun
        ctx.room = list(range(first + ROOM - 1, first - 1, -1))
        activation_checkpoint.join_region(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():
            activation_checkpoint.recompute_region(ctx)
            ctx.begun[current_backward()] = ctx.begin(grad)
        return grad, None, None, None


_ahead: Any = direct_apply(Ahead)


def ahead(moved: Tensor, begin: Begin, begun: Begun) -> Tensor:
    """Appends an ``Ahead`` to ``moved``, the result of a ReshardFunction that reads ``begun``."""
    if moved.grad_fn is None:
        return moved
    first = node_number(moved.grad_fn) + 1
    for _ in range(ROOM):
        moved.view_as(moved)  # uses up a number
    out: Tensor = _ahead(moved, begin, begun, first)
    return out
