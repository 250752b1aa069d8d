"""The autograd function of a transfer between meshes.

Its backward is the transfer between the gradient types of both ends (``autograd/grad_types.py``).
That backward is a transfer again, so a gradient that has crossed may be differentiated again.

Only the rank that computed a gradient knows its dependencies. So a backward with ``create_graph``
records on each rank the transfers that it ran, there and back: the gradient of the *anchor*
(``disttensor.autograd.token``) is then a token that leads to all of them, and
``torch.autograd.grad`` makes each of its results depend on it. A backward from any result reaches
the same transfers on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.grad_types import GradType, gradient_type
from disttensor.cache import cached
from disttensor.comm.work import Work
from disttensor.torch_private import direct_apply, no_dispatch, storage_id
from reshard.cross_mesh import start

Tensor = torch.Tensor


def start_back(grad: Tensor, src: GradType, dst: GradType, tag: int) -> Work[Tensor]:
    """Starts to send the gradient ``grad`` of the local of ``dst``, or of its token, back through
    the transfer from ``src`` to ``dst`` with ``tag``."""
    grad, at, to = _transfer_back(grad, src, dst)
    return start(grad, at.spec, to.spec, tag ^ 1)


def cross_mesh_transfer(x: Tensor, value: Tensor, src: GradType, dst: GradType, tag: int) -> Tensor:
    """Returns the local (or token) of ``dst`` for ``x``, the local (or token) of ``src``; ``value``
    is its value."""
    return _cross_mesh(x, token.anchor(value.device), [value], src, dst, tag)[0]


def own_memory(value: Tensor, local: Tensor) -> Tensor:
    """Returns the received ``value`` in other memory than ``local``, which was sent: within one
    rank a transfer may be a view."""
    same = storage_id(value.untyped_storage()) == storage_id(local.untyped_storage())
    return value.clone() if same else value


def _transfer_back(grad: Tensor, src: GradType, dst: GradType) -> tuple[Tensor, GradType, GradType]:
    at, to, scale = _backward_types(src, dst)
    return grad if scale == 1.0 else grad * scale, at, to


@cached(4096)
def _backward_types(src: GradType, dst: GradType) -> tuple[GradType, GradType, float]:
    """Returns the gradient types of both ends of the transfer back, and the factor of the
    gradient."""
    (to, divide_src), (at, divide_dst) = gradient_type(src), gradient_type(dst)
    return at, to, divide_dst / divide_src


class CrossMesh(torch.autograd.Function):
    """Returns two results: the local (or token) of ``dst``, and a token of the transfer itself.

    ``anchor`` requires grad, so the results do, also if the source is only on other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        value: list[Tensor],
        src: GradType,
        dst: GradType,
        tag: int,
    ) -> tuple[Tensor, Tensor]:
        """Returns both. ``value`` is in a list, so that autograd does not see it as an argument."""
        ctx.ends = src, dst, tag
        with no_dispatch():
            itself = torch.empty(0, device=anchor.device)
        ctx.save_for_backward(itself)  # makes it part of its region: see activation_checkpoint
        ctx.in_region = True
        return value[0].data, itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        src, dst, tag = ctx.ends
        activation_checkpoint.recompute_region(ctx)
        if not torch.is_grad_enabled():
            return start_back(grad, src, dst, tag).wait(), None, None, None, None, None
        grad, at, to = _transfer_back(grad, src, dst)
        with torch.no_grad():
            value = own_memory(start(grad.detach(), at.spec, to.spec, tag ^ 1).wait(), grad)
        anchor = token.anchor(value.device)
        back, itself = _cross_mesh(grad, anchor, [value], at, to, tag ^ 1)
        (there,) = ctx.saved_tensors
        with no_dispatch():
            both = itself + there
        return back, both, None, None, None, None


# Calls C++ directly: the Python layer of Function.apply serves functorch, which is not used here.
_cross_mesh: Any = direct_apply(CrossMesh)
