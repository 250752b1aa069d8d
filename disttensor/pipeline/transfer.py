"""A transfer between two visits, and its two ends in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.cross_mesh import start_back
from disttensor.autograd.grad_types import Typed
from disttensor.comm.work import Work, finished
from disttensor.core.spec import DistSpec
from disttensor.torch_private import direct_apply

Tensor = torch.Tensor


class Transfer:
    """A transfer between meshes that this rank takes part in and whose gradient comes back.

    local     what this rank sent, in the graph of the visit that sent it; None if it only receives
    upstream  the token of what it received without having sent it; None if nothing depends on it
    sent_in, received_in  numbers of the visits, -1 for none
    reached   a gradient has to come for what was sent
    grad      the gradient of what arrived, None as long as there is none
    """

    __slots__ = (
        "arrival", "dst", "grad", "local", "reached", "received_in", "sent_in", "src", "tag",
        "upstream",
    )  # fmt: skip

    def __init__(self, src: DistSpec, dst: DistSpec, tag: int) -> None:
        self.src, self.dst, self.tag = src, dst, tag
        self.local: Tensor | None = None
        self.upstream: Tensor | None = None
        self.sent_in = self.received_in = -1
        self.reached = False
        self.grad: Tensor | None = None
        self.arrival: Work[Tensor] | None = None

    def start_back(self, grad: Tensor | None) -> Work[Tensor]:
        """Start the way back of the gradient: ``grad`` of what arrived here, if anything did."""
        if grad is None:
            grad = token.detached(self.dst.mesh.device, self.dst.dtype)
        return start_back(grad, Typed(self.src), Typed(self.dst), self.tag)


class Turn(Transfer):
    """From a visit to the next one of the same mesh: nothing is sent."""

    __slots__ = ()

    def start_back(self, grad: Tensor | None) -> Work[Tensor]:
        assert grad is not None
        return finished(grad)


class Received(torch.autograd.Function):
    """What a transfer brought; its backward keeps the gradient, zeros too, as it is awaited."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: list[Tensor], transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        activation_checkpoint.join_region(ctx)  # as CrossMesh does when it is computed again
        return value[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        earlier = ctx.transfer.grad
        ctx.transfer.grad = grad if earlier is None else earlier + grad
        return None, None, None


class Sent(torch.autograd.Function):
    """The token of what was sent; its backward notes that a gradient will come."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: Transfer) -> Tensor:
        ctx.sent = transfer
        activation_checkpoint.join_region(ctx)
        return torch.empty(0, dtype=transfer.src.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.sent.reached = True
        return None, None


# Straight to C++: the Python layer of Function.apply serves functorch, which has no part in this.
received: Callable[[Tensor, list[Tensor], Transfer], Tensor] = direct_apply(Received)
sent: Callable[[Tensor, Transfer], Tensor] = direct_apply(Sent)
