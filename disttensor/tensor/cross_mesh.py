"""From one mesh to another, differentiably: what ``reshard`` does when the mesh changes.

Every rank of the world runs this, and each does its part: ranks of the source send, ranks of the
target receive, the others pass the ghost on. The backward moves the gradient from the dual of the
target to the dual of the source (see ``disttensor.autograd.grad_types``), and is reached on every
rank that sent or received: through the local where there is one, else through the ghost.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from disttensor.autograd import recompute, token
from disttensor.autograd.grad_types import Typed, dual
from disttensor.comm import p2p
from disttensor.comm.work import Work
from disttensor.spec import DistSpec
from disttensor.tensor import view_copies
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.torch_private import direct_apply, storage_id
from reshard.cross_mesh import start

Tensor = torch.Tensor
TAPE: ContextVar[Any] = ContextVar(
    "tape", default=None
)  # of the micro-batch that runs: see disttensor.pipeline


def start_back(grad: Tensor, src: DistSpec, dst: DistSpec, tag: int) -> Work[Tensor]:
    """The gradient of what crossed from ``src`` to ``dst`` with ``tag`` starts its way back:
    ``grad`` is that of the local of dst, or of its ghost."""
    (to, divide_src), (at, divide_dst) = dual(Typed(src)), dual(Typed(dst))
    if divide_src != divide_dst:
        grad = grad * (divide_dst / divide_src)
    return start(grad, at.spec, to.spec, tag + 1)


class Cross(torch.autograd.Function):
    """The local (or ghost) of ``src`` as the local (or ghost) of ``dst``, of which ``value`` is
    known already.

    ``anchor`` requires grad, so that the result does where the source is on other ranks only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        value: list[Tensor],
        src: DistSpec,
        dst: DistSpec,
        tag: int,
    ) -> Tensor:
        """``value`` is in a list to be no argument of autograd's."""
        ctx.ends = src, dst, tag
        recompute.hold(ctx)
        return value[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        src, dst, tag = ctx.ends
        recompute.redo(ctx)
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"create_graph: a gradient that came from {dst!r} on {dst.mesh!r} to {src!r} on "
                f"{src.mesh!r} cannot be differentiated again; differentiate twice within a mesh, "
                "or reshard after it"
            )
        return start_back(grad, src, dst, tag).wait(), None, None, None, None, None


_cross: Any = direct_apply(Cross)


def cross(x: DistTensor, dst: DistSpec) -> DistTensor:
    """``x`` on another mesh, in the layout ``dst``. Called by every rank of the world."""
    src = x.spec
    if x._copied:
        view_copies.check(x)
    local = x.local
    tape = TAPE.get()
    if tape is not None:
        tape.passes(src.mesh, dst.mesh)
    sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
    needed = local.requires_grad and torch.is_grad_enabled()
    where = recompute.scope()
    if not sends and not receives:
        if where is None or where.source is None:
            p2p.next_tag()
        return wrap(token.joined([local], dst.mesh.device), dst)
    held = recompute.drawn(where)
    tag = p2p.next_tag() if held is None else -1
    repeated = held is not None
    if held is None:
        with torch.no_grad():
            arrival = start(local.detach(), src, dst, tag)
            held = tape.arrive(arrival, sends, receives) if tape else arrival.wait()
            if sends and storage_id(held.untyped_storage()) == storage_id(local.untyped_storage()):
                held = held.clone()  # nothing moved: it must not be the same memory
    if where is not None:  # a region that is computed again sends and receives nothing again
        recompute.note(where, held)
    if not needed:
        return wrap(held.detach() if receives else token.blank(dst.mesh.device), dst)
    reached = local if sends or local.grad_fn is not None else token.blank(src.mesh.device)
    if tape is not None and not repeated:
        return wrap(tape.cut(reached, held, src, dst, tag), dst)
    return wrap(_cross(reached, token.anchor(held.device), [held], src, dst, tag), dst)
