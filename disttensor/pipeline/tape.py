"""A tape: the graph of one micro-batch, cut where its tensors go from mesh to mesh.

A plain ``loss.backward()`` runs the transfers of the backward inside autograd, one blocking after
another. A schedule does other work while it waits, so here autograd sees each visit of this rank on
its own: what arrives is a leaf that keeps its gradient, what was sent is a root for which the
gradient is received first. A backward of one *visit* (the time from a receive to the next receive
after a send) is one call of autograd.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.comm import p2p
from disttensor.comm.work import Work
from disttensor.errors import user_line
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from disttensor.tensor.backward import run_backward, seed
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import TAPE, start_back
from disttensor.torch_private import next_node, node_number

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
        return start_back(grad, self.src, self.dst, self.tag)


class _Received(torch.autograd.Function):
    """What a transfer brought; its backward keeps the gradient, zeros too, as it is awaited."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: list[Tensor], transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        activation_checkpoint.join_region(
            ctx
        )  # as ``cross_mesh.Cross`` does when the region is computed again
        return value[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        activation_checkpoint.recompute_region(ctx)
        earlier = ctx.transfer.grad
        ctx.transfer.grad = grad if earlier is None else earlier + grad
        return None, None, None


class _Sent(torch.autograd.Function):
    """The token of what was sent; its backward notes that a gradient will come."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        activation_checkpoint.join_region(ctx)
        return torch.empty(0, dtype=transfer.src.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.transfer.reached = True
        return None, None


class Tape:
    """The transfers of one micro-batch, as they happen; then its backward, visit by visit, last
    first.

    ``pause()`` is called where a visit ends; ``waiting(wait)`` calls ``wait``, and may note how
    long it took. ``visits``: how often the program may come to a mesh.
    """

    def __init__(
        self, pause: Callable[[], None], waiting: Callable[[Callable[[], Tensor]], Tensor],
        visits: float = math.inf,
    ) -> None:  # fmt: skip
        self.pause, self.waiting = pause, waiting
        self.visits, self._visits = visits, Counter[ProcessMesh]()
        self._left: set[ProcessMesh] = set()  # meshes that have sent since they received
        self._rests = False  # paused before the end of the program's way to the next visit
        self.transfers: list[Transfer] = []
        self.meshes: list[ProcessMesh] = []  # in the order in which the program came to them
        self.returns: list[str] = []  # ways back to an earlier mesh
        self.visit = 0
        self._began = [-1]  # for each visit: the sequence number of autograd at its beginning
        self._sent = False

    def __enter__(self) -> Tape:
        self._tokens = TAPE.set(self), p2p.BEFORE_HEARING.set(self._rest)
        return self

    def __exit__(self, *exc: object) -> None:
        TAPE.reset(self._tokens[0])
        p2p.BEFORE_HEARING.reset(self._tokens[1])

    def _rest(self) -> None:
        """What this rank is about to hear comes from a visit of another mesh, which may run later:
        if its own visit is over, it goes on with that of another micro-batch."""
        if self._sent and not self._rests:
            self._rests = True
            self.pause()

    # Forward: called by disttensor.tensor.reshard -------------------------------------------------

    def passes(self, src: ProcessMesh, dst: ProcessMesh) -> None:
        """The program goes from one mesh to another, whether this rank has a part in it or not.
        Raises ValueError, before anything is sent, where it comes there once too often."""
        self._visits[dst] += dst in self._left
        self._left = self._left - {dst} | {src}
        if self._visits[dst] >= self.visits:
            raise ValueError(
                f"pipeline.run: the step comes to {dst!r} more often than stages= says, at "
                f"{user_line()}: {self.visits} visits. Name the meshes in the order of all visits"
            )
        for mesh in (src, dst):
            if mesh not in self.meshes:
                self.meshes.append(mesh)
        if self.meshes.index(dst) < self.meshes.index(src):
            self.returns.append(f"from {src!r} to {dst!r}")

    def arrive(self, arrival: Work[Tensor], sends: bool, receives: bool) -> Tensor:
        """The value of a transfer on this rank. A receive after a send begins a new visit."""
        if receives and (self._sent or sends):
            if not self._rests:
                self.pause()
            self.visit, self._sent, self._rests = self.visit + 1, False, False
            self._began.append(next_node())
        elif sends:
            self._sent = True
        return self.waiting(arrival.wait) if receives else arrival.wait()

    def cut(self, local: Tensor, value: Tensor, src: DistSpec, dst: DistSpec, tag: int) -> Tensor:
        """The local (or token) of ``dst``, not joined in the graph to ``local``, that of src."""
        sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
        transfer = Transfer(src, dst, tag)
        self.transfers.append(transfer)
        if sends:
            transfer.local, transfer.sent_in = local, self._made_in(local, self.visit - receives)
        elif local.grad_fn is not None:
            transfer.upstream = local
        anchor = token.anchor(value.device)
        if not receives:
            return _Sent.apply(anchor, transfer)
        transfer.received_in = self.visit
        return _Received.apply(anchor, [value], transfer)

    def _made_in(self, local: Tensor, now: int) -> int:
        """The visit whose graph holds ``local``: a skip connection is sent in a later one."""
        if local.grad_fn is None:
            return now
        number = node_number(local.grad_fn)
        return max(v for v, began in enumerate(self._began) if began < number)

    # Backward -------------------------------------------------------------------------------------

    def backward(self, loss: DistTensor, first: int, last: int) -> None:
        """The backward of visits ``last`` to ``first``; the very last begins with ``loss``."""
        for visit in range(last, first - 1, -1):
            roots: list[Tensor] = []
            grads: list[Tensor] = []
            if visit == self.visit:
                if loss.is_initialized:
                    roots.append(loss.local)
                    grads.append(seed(loss, None))
                else:
                    _reach(loss.local)
            awaited = [t for t in reversed(self.transfers) if t.sent_in == visit and t.reached]
            for t in awaited:
                t.arrival = t.arrival or t.start_back(None)
            for t in awaited:
                assert t.local is not None and t.arrival is not None
                roots.append(t.local)
                grads.append(self.waiting(t.arrival.wait))
            # What this visit read of an earlier one of the same mesh is in that one's graph.
            if roots:
                run_backward(roots, grads, retain_graph=visit > 0)
            self._answer(visit)

    def _answer(self, visit: int) -> None:
        """Send the gradients of what this visit received; what it sent on gets its own later."""
        for t in reversed(self.transfers):
            if t.received_in == visit and t.grad is not None:
                t.arrival, t.grad = t.start_back(t.grad), None
                if t.local is not None:
                    t.reached = True
                elif t.upstream is not None:
                    _reach(t.upstream)
        for t in self.transfers:
            if t.sent_in == visit:
                t.local = None


def _reach(token: Tensor) -> None:
    """Run the backward of a token, which holds no data: it notes which transfers are reached."""
    torch.autograd.backward(token, torch.zeros_like(token))
