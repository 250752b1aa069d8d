"""The graph of one micro-batch, cut where its tensors go from mesh to mesh.

A single ``loss.backward()`` would run the transfers of the backward inside autograd, one blocking
after another. A schedule does other work while it waits. So autograd sees each visit of this rank
separately: received tensors are leaves that keep their gradients; sent tensors are roots whose
gradients are received first. A backward of one *visit* (the time from a receive to the next receive
after a send) is one call of autograd.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from disttensor import callbacks
from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.graph import nodes_of
from disttensor.autograd.joined_backward import one_backward
from disttensor.autograd.split_backward import REGION, SplitBackward
from disttensor.autograd.starts import graph_of, node_count
from disttensor.comm import p2p
from disttensor.comm.process_group import is_nccl
from disttensor.comm.work import Work
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.errors import user_line
from disttensor.pipeline.transfer import Transfer, Turn, received, sent
from disttensor.pipeline.unsplit import tell
from disttensor.tensor.backward import run_given, seed
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import TAPE
from disttensor.torch_private import next_node, node_number

Tensor = torch.Tensor


class MicroBatchGraph:
    """The transfers of one micro-batch as they happen; then its backward, visit by visit, from the
    last to the first.

    ``pause()`` is called at the end of a visit; ``waiting(wait)`` calls ``wait`` and records its
    time (None: not recorded). ``visits``: most visits of a mesh. ``turns``: a visit may follow
    another visit of the same mesh, see ``turn``.
    """

    def __init__(
        self, pause: Callable[[], None],
        waiting: Callable[[Callable[[], Tensor]], Tensor] | None = None,
        visits: float = math.inf, turns: bool = False,
    ) -> None:  # fmt: skip
        self.pause, self.waiting = pause, waiting
        self.visits, self._visits = visits, dict[ProcessMesh, int]()
        self.order: Sequence[ProcessMesh] | None = None  # of the visits, if given
        self.turns, self.turned = turns, False
        self._left: set[ProcessMesh] = set()  # meshes that have sent since they received
        self._rests = False  # paused before the receive that begins the next visit
        self.transfers: list[Transfer] = []
        self.came: list[tuple[DistSpec, DistSpec, int]] = []  # in the first visit: from, to, tag
        self.meshes: list[ProcessMesh] = []  # in the order in which the program came to them
        self.returns: list[tuple[ProcessMesh, ProcessMesh]] = []  # transfers to an earlier mesh
        self.visit = 0
        self.stage: int | None = None  # None: the index of its mesh among the meshes visited
        self._count = 0  # the node count (``node_count``) that numbers its graph
        self._began = [-1]  # for each visit: the sequence number of autograd at its begin
        self._sent = False
        self._region: Any = None  # of the last transfer
        self._met: dict[frozenset[int], ProcessMesh] = {}  # meshes of the region, by ranks
        self._regions: list[tuple[int, int]] = []  # node numbers of recomputed regions
        self._weights: dict[int, SplitBackward] = {}  # visits after their I and before their W

    def __enter__(self) -> MicroBatchGraph:
        self._tokens = TAPE.set(self), callbacks.before_metadata_receive.set(self._rest)
        self._region_token = activation_checkpoint.REGIONS.set(self._regions)
        self._count = node_count()
        return self

    def __exit__(self, *exc: object) -> None:
        TAPE.reset(self._tokens[0])
        callbacks.before_metadata_receive.reset(self._tokens[1])
        activation_checkpoint.REGIONS.reset(self._region_token)

    def _rest(self) -> None:
        """Pauses, if this rank's visit is over, before a receive of metadata from another mesh,
        whose visit may run later. Another micro-batch goes on."""
        if self._sent and not self._rests:
            self._rests = True
            self.pause()

    # Forward: called by disttensor.tensor.reshard -------------------------------------------------

    def passes(self, src: ProcessMesh, dst: ProcessMesh, with_grad: bool) -> None:
        """Records a transfer of the program between two meshes, also if this rank has no part in
        it. Raises ValueError, before the transfer, for a visit too many or out of order."""
        if dst in self._left:
            self._visits[dst] = self._visits.get(dst, 0) + 1
            self._left.discard(dst)
        self._left.add(src)
        if self._visits.get(dst, 0) >= self.visits:
            raise ValueError(
                f"pipeline.run: the step comes to {dst!r} more often than stages= says, at "
                f"{user_line()}: {self.visits} visits. Name the meshes in the order of all visits"
            )
        if self.order is not None and (with_grad or self.turns):
            self._check_order(src, dst)
        if with_grad and (run := activation_checkpoint.outermost_run()) is not None:
            self._check_region(run, src, dst)
        for mesh in (src, dst):
            if mesh not in self.meshes:
                self.meshes.append(mesh)
        if self.meshes.index(dst) < self.meshes.index(src):
            self.returns.append((src, dst))

    def _check_order(self, src: ProcessMesh, dst: ProcessMesh) -> None:
        """Checks that a visit needs earlier visits only. Visits in a row on one mesh are one."""
        assert self.order is not None
        way = [mesh for mesh, _ in groupby(self.order)]
        if src not in way or dst not in way:
            return
        from_, to = (
            [i for i, mesh in enumerate(way) if mesh is end][self._visits.get(end, 0) :][:1]
            for end in (src, dst)
        )
        if from_ >= to:  # an empty list: more visits than the order has
            raise ValueError(
                f"pipeline.run: the step goes from {src!r} to {dst!r}, at {user_line()}, which is "
                f"not on the way that stages={list(self.order)} names. Give the meshes in the "
                "order in which the step visits them, and a schedule that takes this way"
            )

    def _check_region(self, run: Any, src: ProcessMesh, dst: ProcessMesh) -> None:
        """Raises ValueError if two meshes of a region share some of their ranks only. The backward
        of each visit computes the region again: the shared ranks would do so more often, and their
        collectives would not match."""
        if run is not self._region:
            self._region, self._met = run, {}
        for mesh in (src, dst):
            own = frozenset(mesh.ranks)
            for ranks, other in self._met.items():
                if own != ranks and own & ranks:
                    raise ValueError(
                        f"pipeline.run: at {user_line()} a region of torch.utils.checkpoint comes "
                        f"to {mesh!r}, and it computes on {other!r} too, which shares ranks "
                        f"{sorted(own & ranks)} only. Reshard between regions, or give the meshes "
                        "the same ranks"
                    )
            self._met[own] = mesh

    def begins(self, stages: Sequence[ProcessMesh]) -> None:
        """Checks that a model split over these visits fits the order of the schedule. Raises
        ValueError before any message is sent."""
        rest = iter(self.order or ())
        if self.order is not None and not all(mesh in rest for mesh in stages):
            raise ValueError(
                f"pipeline.run: stages={list(self.order)}, and the model is split over the visits "
                f"{list(stages)}: split it over the visits of the schedule (pipeline.visits says "
                "them), or give run the stages of the split and a schedule that takes this way"
            )

    def place(self) -> int:
        """Returns this rank's stage: by default the index of its mesh among the meshes visited."""
        if self.stage is not None:
            return self.stage
        return next((i for i, m in enumerate(self.meshes) if m.coordinate is not None), 0)

    def arrive(self, arrival: Work[Tensor], src: DistSpec, dst: DistSpec, tag: int) -> Tensor:
        """Returns the value of a transfer. A receive after a send begins a new visit."""
        sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
        if receives and (self._sent or sends):
            if not self._rests:
                self.pause()
            self.visit, self._sent, self._rests = self.visit + 1, False, False
            self._began.append(next_node())
        elif sends:
            self._sent = True
        elif self.visit == 0:
            self.came.append((src, dst, tag))
        if receives and self.waiting is not None:
            return self.waiting(arrival.wait)
        return arrival.wait()

    def turn(self, xs: Sequence[DistTensor]) -> list[DistTensor]:
        """Begins the next visit on the same mesh, with these tensors."""
        if not xs[0].is_initialized:
            return list(xs)
        self.pause()
        self.turned = True
        self.visit, self._sent, self._rests = self.visit + 1, False, False
        self._began.append(next_node())
        return [self._turned(x) if x.requires_grad else x for x in xs]

    def _turned(self, x: DistTensor) -> DistTensor:
        transfer = Turn(x.spec, x.spec, -1)
        transfer.local, transfer.sent_in = x.local, self._made_in(x.local, self.visit - 1)
        transfer.received_in = self.visit
        self.transfers.append(transfer)
        value = x.local.detach()
        return x.like(received(token.anchor(value.device), [value], transfer), x.spec)

    def cut(self, local: Tensor, value: Tensor, src: DistSpec, dst: DistSpec, tag: int) -> Tensor:
        """Returns the local (or token) of ``dst``, without an edge to ``local`` (of ``src``)."""
        sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
        transfer = Transfer(src, dst, tag)
        self.transfers.append(transfer)
        if sends:
            transfer.local, transfer.sent_in = local, self._made_in(local, self.visit - receives)
        elif local.grad_fn is not None:
            transfer.upstream = local
        anchor = token.anchor(value.device)
        if not receives:
            return sent(anchor, transfer)
        transfer.received_in = self.visit
        return received(anchor, [value], transfer)

    def _made_in(self, local: Tensor, now: int) -> int:
        """Returns the visit whose graph holds ``local``, as a skip connection is sent later."""
        if local.grad_fn is None or not now:
            return now
        number = node_number(local.grad_fn)
        return max(v for v, began in enumerate(self._began) if began < number)

    # Backward -------------------------------------------------------------------------------------

    def ends(self, loss: DistTensor) -> None:
        """Ends the program: the gradients that will arrive for its sends are now known. Raises
        ValueError if it visited a mesh less often than the schedule."""
        if self.order is not None and self.turns:
            times = Counter(mesh for mesh, _ in groupby(self.order))
            for mesh, n in times.items():
                if self._visits.get(mesh, 0) < n - 1:
                    raise ValueError(
                        f"pipeline.run: the step has left {mesh!r} for good after "
                        f"{self._visits.get(mesh, 0) + 1} visits, and stages={list(self.order)} "
                        "names more. Give the meshes in the order in which the step visits them, "
                        "and a schedule that takes this way"
                    )
        if not loss.is_initialized:
            _reach(loss.local)
        self._ask()

    def _ask(self) -> None:
        """Posts receives of gradients, so that they arrive before their backward. Not over NCCL,
        which has no tags: it would match them in the order of the posts."""
        if not is_nccl():
            for t in self.transfers:
                if t.reached and t.arrival is None and t.received_in < 0:
                    t.arrival = t.start_back(None)

    def close(self) -> None:
        """Drops posted receives after an error: their messages may never arrive."""
        if any(t.arrival is not None for t in self.transfers):
            with p2p.abandoning():
                for t in self.transfers:
                    t.arrival = None

    def backward(
        self, loss: DistTensor, first: int, last: int, put_off_weights: bool = False
    ) -> bool:
        """Runs the backward of visits ``last`` to ``first``; the last visit of all begins with
        ``loss``. Returns True if gradients of weights were deferred to ``weights``."""
        for visit in range(last, first - 1, -1):
            roots: list[Tensor] = []
            grads: list[Tensor] = []
            if visit == self.visit and loss.is_initialized:
                roots.append(loss.local)
                grads.append(seed(loss, None))
            awaited = [t for t in reversed(self.transfers) if t.sent_in == visit and t.reached]
            for t in awaited:
                t.arrival = t.arrival or t.start_back(None)
            for t in awaited:
                assert t.local is not None and t.arrival is not None
                roots.append(t.local)
                wait = t.arrival.wait
                grads.append(wait() if self.waiting is None else self.waiting(wait))
            # The graph of an earlier visit of the same mesh holds the nodes that this visit read.
            with graph_of(self._count):
                if roots and put_off_weights:
                    self._split(visit, roots, grads)
                elif roots:
                    run_given(roots, grads, visit > 0)
            self._answer(visit)
            self._ask()
        return put_off_weights and any(v in self._weights for v in range(first, last + 1))

    def _split(self, visit: int, roots: list[Tensor], grads: list[Tensor]) -> None:
        begin = self._began[visit]

        def own(node: Any) -> bool:
            return node_number(node) >= begin

        def whole(node: Any) -> str:
            number = node_number(node)
            if any(a <= number < b for a, b in self._regions):
                return REGION
            return "made of what an earlier visit computed" if number < begin else ""

        split = SplitBackward(roots, grads, whole=whole, own=own, engine=run_given)
        if split.at_once:
            tell(split.at_once, self.place())
        split.inputs(retain_graph=visit > 0)
        if not split.is_whole:
            self._weights[visit] = split

    def weights(self, first: int, last: int) -> None:
        """Computes the gradients of weights that ``backward`` of these visits deferred."""
        with graph_of(self._count), one_backward():
            for visit in range(last, first - 1, -1):
                if visit in self._weights:
                    self._weights.pop(visit).weights()

    def _answer(self, visit: int) -> None:
        """Sends the gradients of the tensors that this visit received, and drops sent locals."""
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
    """Marks the transfers that a backward from a token, which holds no data, would reach."""
    for node in nodes_of([token]):
        transfer = getattr(node, "sent", None)
        if transfer is not None:
            transfer.reached = True
