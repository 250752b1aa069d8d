"""A transfer between two visits, and its two ends in the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.cross_mesh import start_back
from disttensor.autograd.grad_types import GradType
from disttensor.comm.work import Work, finished
from disttensor.core.spec import DistSpec
from disttensor.torch_private import direct_apply

Tensor = torch.Tensor


# NEEDED: a gradient of the sent tensor will arrive. GRAD_STARTED: sent, or its receive is posted.
TransferState = Enum("TransferState", "FORWARD_DONE NEEDED GRAD_STARTED DONE")


@dataclass(eq=False)
class Transfer:
    """A transfer between meshes in which this rank takes part and whose gradient is sent back."""

    src: DistSpec
    dst: DistSpec
    tag: int | None  # None: to the next visit of the same mesh, without a message
    state: TransferState = TransferState.FORWARD_DONE
    # of the sent tensor when it was sent: it may be written later. None if this rank only receives
    edge: GradientEdge | None = None
    upstream: Tensor | None = (
        None  # the token of a tensor that this rank receives and does not send
    )
    sent_in: int = -1  # number of the visit, -1 for none
    received_in: int = -1
    grad: Tensor | None = None  # of the received tensor, None until it is computed
    arrival: Work[Tensor] | None = None  # receives the gradient, or sends it

    def need_grad(self) -> None:
        """Records that a gradient of the sent tensor will arrive."""
        if self.state is TransferState.FORWARD_DONE:
            self.state = TransferState.NEEDED

    def start_grad(self) -> None:
        """Starts to send the gradient of the received tensor, or posts its receive."""
        if self.arrival is None:
            grad, self.grad, self.state = self.grad, None, TransferState.GRAD_STARTED
            if grad is None:
                grad = token.no_grad_token(self.dst.mesh.device, self.dst.dtype)
            if self.tag is None:
                self.arrival = finished(grad)
            else:
                self.arrival = start_back(grad, GradType(self.src), GradType(self.dst), self.tag)

    def wait_for_grad(self, wait: Callable[[Callable[[], Tensor]], Tensor]) -> Tensor:
        """Returns the gradient of the sent tensor. ``wait`` calls the function that waits."""
        assert self.arrival is not None
        arrival, self.arrival, self.state = self.arrival, None, TransferState.DONE
        return wait(arrival.wait)


class Received(torch.autograd.Function):
    """The received tensor; its backward keeps the gradient, even if 0: the sender waits for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: list[Tensor], transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        if transfer.tag is not None:  # as CrossMesh does in a recomputation, which cuts nothing
            activation_checkpoint.join_region(ctx)
        return value[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.transfer.grad = grad
        return None, None, None


class Sent(torch.autograd.Function):
    """The token of a sent tensor; its backward records that a gradient will arrive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: Transfer) -> Tensor:
        ctx.sent = transfer
        activation_checkpoint.join_region(ctx)
        return torch.empty(0, dtype=transfer.src.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.sent.need_grad()
        return None, None


# Calls C++ directly: the Python layer of Function.apply serves functorch, which is not used here.
received: Callable[[Tensor, list[Tensor], Transfer], Tensor] = direct_apply(Received)
sent: Callable[[Tensor, Transfer], Tensor] = direct_apply(Sent)
