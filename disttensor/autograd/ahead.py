"""A reduction of the backward begins when what it adds up is there, and is waited for later.

    x -> Move -> Ahead -> uses of x, as products with weights    (a backward goes from the right)

It comes to ``Ahead`` when the gradient of all uses is complete, and begins its reduction; it comes
to ``Move`` (``disttensor.autograd.grad_types``) for the result. Of all nodes that are ready
autograd runs the one with the highest number, and a new node has the next number. So a few numbers
are left out between the two, the *room*. The gradient of a weight takes one of them
(``ops.linalg.beside``), and is computed while the reduction is under way.

Numbers stay unique, and those of a node's inputs below its own: a backward runs the nodes of the
program in one order, on all ranks alike, whatever a rank's piece is.
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
    """The identity, whose backward begins what the ``Move`` before it will wait for.

    Where the gradient is to be differentiated again, nothing begins here: the Move does it all.
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
    """``moved``, the result of a Move that looks into ``begun``."""
    if moved.grad_fn is None:
        return moved
    first = node_number(moved.grad_fn) + 1
    for _ in range(ROOM):
        moved.view_as(moved)  # a node, and nothing else
    out: Tensor = _ahead(moved, begin, begun, first)
    return out
