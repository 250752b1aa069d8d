"""A transfer between two visits, and its two ends in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.cross_mesh import start_back
from disttensor.autograd.grad_types import GradType
from disttensor.comm.work import Work, finished
from disttensor.core.spec import DistSpec
from disttensor.torch_private import direct_apply

Tensor = torch.Tensor


class Transfer:
    """A transfer between meshes in which this rank takes part and whose gradient is sent back.

    local     the sent tensor, in the graph of its visit; None if this rank only receives
    upstream  the token of a tensor that this rank receives and has not sent; None without a graph
    sent_in, received_in  numbers of the visits, -1 for none
    reached   True if a gradient of the sent tensor will arrive
    grad      the gradient of the received tensor, None until it is computed
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
        """Starts to send the gradient back: ``grad`` of the received tensor, if there is one."""
        if grad is None:
            grad = token.detached(self.dst.mesh.device, self.dst.dtype)
        return start_back(grad, GradType(self.src), GradType(self.dst), self.tag)


class Turn(Transfer):
    """A step from a visit to the next visit of the same mesh, without a message."""

    __slots__ = ()

    def start_back(self, grad: Tensor | None) -> Work[Tensor]:
        assert grad is not None
        return finished(grad)


class Received(torch.autograd.Function):
    """The received tensor; its backward keeps the gradient, even if 0: the sender waits for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: list[Tensor], transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        activation_checkpoint.join_region(ctx)  # as CrossMesh does in a recomputation
        return value[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        earlier = ctx.transfer.grad
        ctx.transfer.grad = grad if earlier is None else earlier + grad
        return None, None, None


class Sent(torch.autograd.Function):
    """The token of a sent tensor; its backward marks that a gradient will arrive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: Transfer) -> Tensor:
        ctx.sent = transfer
        activation_checkpoint.join_region(ctx)
        return torch.empty(0, dtype=transfer.src.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.sent.reached = True
        return None, None


# Calls C++ directly: the Python layer of Function.apply serves functorch, which is not used here.
received: Callable[[Tensor, list[Tensor], Transfer], Tensor] = direct_apply(Received)
sent: Callable[[Tensor, Transfer], Tensor] = direct_apply(Sent)
