"""The graph of one micro-batch, cut where its tensors go from mesh to mesh.

A single ``loss.backward()`` would run the transfers of the backward inside autograd, where each
blocks the next. A schedule does other work while it waits. So autograd sees each *visit* of this
rank separately. A visit begins with a receive, and ends before the first receive that follows a
send. Received tensors are leaves that keep their gradients; sent tensors are roots whose gradients
are received first. The backward of one visit is one call of autograd.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby
from operator import call
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from disttensor import callbacks
from disttensor.autograd import activation_checkpoint, token
from disttensor.autograd.joined_backward import one_backward
from disttensor.autograd.split_backward import REGION, SplitBackward
from disttensor.autograd.starts import count_of_graphs, node_count
from disttensor.comm import p2p
from disttensor.comm.process_group import is_nccl
from disttensor.comm.work import Work
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.errors import user_line
from disttensor.graph_nodes import nodes_of
from disttensor.pipeline.shared_state import SharedState
from disttensor.pipeline.transfer import Transfer, TransferState, received, sent
from disttensor.pipeline.unsplit import warn_unsplit
from disttensor.pipeline.visit_graph import VisitGraph, divide
from disttensor.tensor.backward import initial_grad, run_given
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import MICRO_BATCH
from disttensor.torch_private import node_number

Tensor = torch.Tensor


# SENT: has sent since it received, so the next receive begins a visit. PAUSED: also paused for it.
ProgramState = Enum("ProgramState", "COMPUTING SENT PAUSED ENDED")


_ARRIVES = (TransferState.NEEDED, TransferState.GRAD_STARTED)  # for a sent tensor


class MicroBatchGraph:
    """The transfers of one micro-batch as they happen; then its backward, visit by visit, from the
    last to the first.

    Args:
        pause: is called at the end of a visit.
        waiting: calls a function that blocks, and may record its time.
        most_visits: the largest number of visits of one mesh.
        has_boundaries: a visit may follow another visit of the same mesh, see ``next_visit``.
    """

    def __init__(
        self, pause: Callable[[], None],
        waiting: Callable[[Callable[[], Tensor]], Tensor] | None = None,
        most_visits: float = math.inf, has_boundaries: bool = False,
    ) -> None:  # fmt: skip
        self.pause, self.waiting = pause, waiting or call
        self.most_visits, self._counts = most_visits, Counter[ProcessMesh]()  # visits so far
        self.has_boundaries, self.found_boundary = has_boundaries, False
        self.order: Sequence[ProcessMesh] | None = None  # of the visits, if given
        self.stage: int | None = None  # None: the index of its mesh among the meshes visited
        self.state = ProgramState.COMPUTING
        self.shared_state: SharedState | None = None  # None: no micro-batch runs in a pause
        self.layers: list[Any] = []  # that have run since the last transfer, for ``shared_state``
        self.visits = [VisitGraph()]
        self.transfers: list[Transfer] = []
        self.first_receives: list[tuple[DistSpec, DistSpec, int]] = []  # of the first visit
        self.meshes: list[ProcessMesh] = []  # in the order of the first visits
        self.first_return: tuple[ProcessMesh, ProcessMesh] | None = None  # to an earlier mesh
        self._left: set[ProcessMesh] = set()  # meshes that have sent since they received
        self._graph = node_count()  # of the thread that runs its forward
        self._region: Any = None  # of the last transfer
        self._region_meshes: dict[frozenset[int], ProcessMesh] = {}  # by their ranks
        self._regions: list[tuple[int, int]] = []  # node numbers of recomputed regions

    def __enter__(self) -> MicroBatchGraph:
        self._tokens = MICRO_BATCH.set(self), callbacks.before_metadata_receive.set(self._end_visit)
        self._region_token = activation_checkpoint.REGIONS.set(self._regions)
        self._graph = node_count()
        return self

    def __exit__(self, *exc: object) -> None:
        MICRO_BATCH.reset(self._tokens[0])
        callbacks.before_metadata_receive.reset(self._tokens[1])
        activation_checkpoint.REGIONS.reset(self._region_token)

    # Forward: called by disttensor.tensor.reshard -------------------------------------------------

    def record_transfer(self, src: ProcessMesh, dst: ProcessMesh, with_grad: bool) -> None:
        """Records a transfer of the program between two meshes, also if this rank takes no part.
        Raises ValueError, before a message is sent, if ``dst`` is visited too often or out of
        order, or if a recomputed region uses meshes that share only some of their ranks. Raises
        RuntimeError if the step has changed the state that micro-batches share."""
        self._check_shared_state()
        if dst in self._left:
            self._counts[dst] += 1
            self._left.discard(dst)
        self._left.add(src)
        if self._counts[dst] >= self.most_visits:
            raise ValueError(
                f"pipeline.run: at {user_line()} the step visits {dst!r} more often than stages= "
                f"names it: {self.most_visits} times. Name the meshes in the order of all visits"
            )
        if self.order is not None and (with_grad or self.has_boundaries):
            self._check_order(self.order, src, dst)
        if with_grad and (run := activation_checkpoint.outermost_run()) is not None:
            self._check_region(run, src, dst)
        for mesh in (src, dst):
            if mesh not in self.meshes:
                self.meshes.append(mesh)
        if self.first_return is None and self.meshes.index(dst) < self.meshes.index(src):
            self.first_return = src, dst

    def _check_shared_state(self, where: str = "") -> None:
        if self.shared_state is not None:
            self.shared_state.check(self.layers, where)
            self.layers.clear()

    def _check_order(
        self, order: Sequence[ProcessMesh], src: ProcessMesh, dst: ProcessMesh
    ) -> None:
        """Checks that a visit needs earlier visits only. Visits in a row on one mesh are one."""
        route = [mesh for mesh, _ in groupby(order)]
        if src not in route or dst not in route:
            return
        from_, to = (
            [i for i, mesh in enumerate(route) if mesh is end][self._counts[end] :][:1]
            for end in (src, dst)
        )
        if from_ >= to:  # an empty list: more visits than the order has
            raise ValueError(
                f"pipeline.run: the step goes from {src!r} to {dst!r}, at {user_line()}, which is "
                f"not in the order of stages={list(order)}. {_GIVE_ORDER}"
            )

    def _check_region(self, run: Any, src: ProcessMesh, dst: ProcessMesh) -> None:
        """Raises ValueError if two meshes of a region share some of their ranks only. The backward
        of each visit computes the region again: the shared ranks would do so more often, and their
        collectives would not match."""
        if run is not self._region:
            self._region, self._region_meshes = run, {}
        for mesh in (src, dst):
            own = frozenset(mesh.ranks)
            for ranks, other in self._region_meshes.items():
                if own != ranks and own & ranks:
                    raise ValueError(
                        f"pipeline.run: at {user_line()} a region of torch.utils.checkpoint uses "
                        f"{mesh!r}, and it computes on {other!r} too, which shares only ranks "
                        f"{sorted(own & ranks)}. Reshard between regions, or give the meshes the "
                        "same ranks"
                    )
            self._region_meshes[own] = mesh

    def check_stages(self, stages: Sequence[ProcessMesh]) -> None:
        """Checks that a model split over these visits fits the order of the schedule. Raises
        ValueError before any message is sent."""
        rest = iter(self.order or ())
        if self.order is not None and not all(mesh in rest for mesh in stages):
            raise ValueError(
                f"pipeline.run: stages={list(self.order)}, and the model is split over the visits "
                f"{list(stages)}: split it over the visits of the schedule (pipeline.visits "
                "returns them), or pass the stages of the split and a schedule of this order to run"
            )

    def rank_stage(self) -> int:
        """Returns this rank's stage: by default the index of its mesh among the meshes visited."""
        if self.stage is not None:
            return self.stage
        return next((i for i, m in enumerate(self.meshes) if m.coordinate is not None), 0)

    def receive(self, arrival: Work[Tensor], src: DistSpec, dst: DistSpec, tag: int) -> Tensor:
        """Returns the value of a transfer. A receive after a send begins a new visit."""
        sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
        if receives and (sends or self.state is not ProgramState.COMPUTING):
            self._begin_visit()
        elif sends and self.state is ProgramState.COMPUTING:
            self.state = ProgramState.SENT
        elif not sends and len(self.visits) == 1:
            self.first_receives.append((src, dst, tag))
        return self.waiting(arrival.wait) if receives else arrival.wait()

    def _end_visit(self) -> None:
        """Pauses this micro-batch, if this rank's visit is over, before it receives metadata from
        another mesh, which may send them later. Another micro-batch runs meanwhile."""
        if self.state is ProgramState.SENT:
            self.state = ProgramState.PAUSED
            if self.shared_state is not None:
                self.shared_state.check(self.layers)
            self.pause()

    def _begin_visit(self) -> None:
        if self.state is not ProgramState.PAUSED:
            self.pause()
        self.state = ProgramState.COMPUTING
        self.visits.append(VisitGraph())

    def next_visit(self, xs: Sequence[DistTensor]) -> list[DistTensor]:
        """Begins the next visit on the same mesh, with these tensors."""
        self._check_shared_state()
        if not xs[0].is_initialized:
            return [x.like(x.local, x.spec) if x.requires_grad else x for x in xs]
        self.found_boundary = True
        self._begin_visit()
        return [
            x.like(self.cut(x.local, x.local.detach(), x.spec, x.spec), x.spec)
            if x.requires_grad
            else x
            for x in xs
        ]

    def cut(
        self, local: Tensor, value: Tensor, src: DistSpec, dst: DistSpec, tag: int | None = None
    ) -> Tensor:
        """Returns the local (or token) of ``dst``, without an edge to ``local`` (of ``src``).
        ``tag``: of the messages; None where the next visit begins on the same mesh."""
        sends, receives = src.mesh.coordinate is not None, dst.mesh.coordinate is not None
        transfer, visit = Transfer(src, dst, tag), len(self.visits) - 1
        self.transfers.append(transfer)
        if sends:
            transfer.edge = get_gradient_edge(local)
            transfer.sent_in = visit - receives
        elif local.grad_fn is not None:
            transfer.upstream = local
        anchor = token.anchor(value.device)
        if not receives:
            return sent(anchor, transfer)
        transfer.received_in = visit
        return received(anchor, [value], transfer)

    # Backward -------------------------------------------------------------------------------------

    def end(self, loss: DistTensor) -> None:
        """Ends the program: the gradients that will arrive for its sends are now known. Raises
        ValueError if it visited a mesh less often than the schedule."""
        self._check_shared_state("its end")
        self.state = ProgramState.ENDED
        if self.order is not None and self.has_boundaries:
            for mesh, n in Counter(mesh for mesh, _ in groupby(self.order)).items():
                made = self._counts[mesh] + 1
                if made < n:
                    raise ValueError(
                        f"pipeline.run: the step visited {mesh!r} {made} time{'s' * (made > 1)}, "
                        f"but stages={list(self.order)} names more visits. {_GIVE_ORDER}"
                    )
        if not loss.is_initialized:
            _need_grads(loss.local)
        if len(self.visits) > 1:
            starts: list[list[GradientEdge]] = [[] for _ in self.visits]
            if loss.is_initialized:
                starts[-1].append(get_gradient_edge(loss.local))
            for t in self.transfers:
                if t.edge is not None:
                    starts[t.sent_in].append(t.edge)
            divide(self.visits, starts)
        self._post_receives()

    def _post_receives(self) -> None:
        """Posts receives of gradients, so that they arrive before their backward. Not over NCCL,
        which has no tags: it would match them in the order of the posts."""
        if not is_nccl():
            for t in self.transfers:
                if t.state is TransferState.NEEDED:
                    t.start_grad()

    def close(self) -> None:
        """Drops posted receives after an error: their messages may never arrive."""
        with p2p.abandon_receives():
            for t in self.transfers:
                t.arrival = None

    def backward(
        self, loss: DistTensor, first: int, last: int, defer_weights: bool = False
    ) -> bool:
        """Runs the backward of visits ``last`` to ``first``; the last visit of all begins with
        ``loss``. Returns True if gradients of weights were deferred to ``backward_weight``."""
        assert self.state is ProgramState.ENDED
        for number in range(last, first - 1, -1):
            visit, found = self.visits[number], list[tuple[GradientEdge, Tensor]]()
            if number == len(self.visits) - 1 and loss.is_initialized:
                found.append((get_gradient_edge(loss.local), initial_grad(loss, None)))
            awaited = [
                t for t in reversed(self.transfers) if t.sent_in == number and t.state in _ARRIVES
            ]
            for t in awaited:
                t.start_grad()
            for t in awaited:
                assert t.edge is not None
                found.append((t.edge, t.wait_for_grad(self.waiting)))
            for edge, grad in found:
                self.visits[visit.stops.get(edge.node, number)].passed.append((edge, grad))
            with count_of_graphs(self._graph), visit.passing(self.visits):
                self._backward_visit(visit, defer_weights)
            self._send_grads(number)
            self._post_receives()
        return any(v.split is not None for v in self.visits[first : last + 1])

    def _backward_visit(self, visit: VisitGraph, defer_weights: bool) -> None:
        """Runs the backward of a visit. With ``defer_weights`` it computes the gradients of inputs,
        and defers the gradients of weights where possible."""
        roots, grads = [edge for edge, _ in visit.passed], [grad for _, grad in visit.passed]
        visit.passed = []
        if not roots:
            return
        if not defer_weights:
            run_given(roots, grads, False, [GradientEdge(node, 0) for node in visit.ends])
            return

        def keep_whole(node: Any) -> str:
            number = node_number(node)
            return REGION if any(a <= number < b for a, b in self._regions) else ""

        visit.split = split = SplitBackward(
            roots, grads, keep_whole=keep_whole, engine=run_given, readers=visit.readers,
            stops=visit.stops,
        )  # fmt: skip
        if split.unsplit:
            warn_unsplit(split.unsplit, self.rank_stage())
        split.inputs()
        if split.is_whole:
            visit.split = None

    def backward_weight(self, first: int, last: int) -> bool:
        """Computes the gradients of weights that ``backward`` of these visits deferred. Returns
        False if there are none."""
        with count_of_graphs(self._graph), one_backward():
            deferred = False
            for visit in reversed(self.visits[first : last + 1]):
                split, visit.split = visit.split, None
                if split is not None:
                    split.weights()
                    deferred = True
            return deferred

    def _send_grads(self, number: int) -> None:
        """Sends the gradients of the tensors that a visit received, and drops edges."""
        for t in reversed(self.transfers):
            if t.received_in == number and t.grad is not None:
                t.start_grad()
                if t.edge is None and t.upstream is not None:
                    _need_grads(t.upstream)
        for t in self.transfers:
            if t.sent_in == number:
                t.edge = None


_GIVE_ORDER = (
    "Pass the meshes in the order in which the step visits them, and a schedule of this order"
)


def _need_grads(token: Tensor) -> None:
    """Marks the transfers that a backward from a token, which holds no data, would reach."""
    for node in nodes_of([token]):
        transfer = getattr(node, "sent", None)
        if transfer is not None:
            transfer.need_grad()
