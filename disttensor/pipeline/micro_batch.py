"""One micro-batch on this rank: its program, its graph, and its actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from disttensor.comm import p2p
from disttensor.comm.process_group import world
from disttensor.core.mesh import ProcessMesh
from disttensor.observe import observers_of_thread
from disttensor.pipeline.action import Action
from disttensor.pipeline.coroutine import Coroutine
from disttensor.pipeline.micro_batch_graph import MicroBatchGraph
from disttensor.pipeline.random_state import RandomState
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.timeline import Event
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
Step = Callable[[Any], Any]


class MicroBatch:
    """One micro-batch on this rank: a forward, which may pause between visits, and a backward."""

    def __init__(
        self, step: Step, batch: Any, number: int, channel: int, chunks: int,
        random_state: RandomState | None,
    ) -> None:  # fmt: skip
        self.step, self.batch, self.number, self.chunks = step, batch, number, chunks
        self.channel = channel
        self.first_transfer = 0  # number of transfers on its channel before its program
        self.observers = observers_of_thread()
        self.loss: Any = None
        visits = chunks if chunks > 1 else math.inf
        waiting = self._waiting if self.observers else None
        self.graph = MicroBatchGraph(self._pause, waiting, visits, has_boundaries=chunks > 1)
        self.coroutine = Coroutine(self._run_step) if chunks > 1 else None
        self.random_state = random_state  # None: the generators of the process
        self.chunk, self.shape = 0, "loop"
        self.stays_after: set[int] = set()

    def at(self, stage: int, plan: Schedule, order: Sequence[ProcessMesh] | None) -> None:
        """Sets this rank's stage and, if given, the ``order`` of visits of the program. After the
        visits in ``stays_after`` the program stays on the stage."""
        self.graph.stage, self.graph.order = stage, order
        self.shape = plan.shape if plan.chunks > 1 else "loop"
        ways = [plan.virtual(stage, chunk) for chunk in range(plan.chunks)]
        self.stays_after = {c for c, (way, then) in enumerate(pairwise(ways)) if then == way + 1}

    def carry_out(self, action: Action) -> None:
        for o in self.observers:
            o.begin_action(action)
        start, kind = time.perf_counter(), action.kind
        if kind == "F":
            self.forward(action.chunk)
        elif kind == "W":
            if not self.weights(action.chunk):
                return
        elif not self.backward(action.chunk, defer_weights=kind == "I"):
            kind = "B"  # no gradients of weights were deferred
        if self.observers:
            self._note(kind, action.chunk, start)

    def forward(self, chunk: int) -> None:
        """Runs the program to the end of this visit, or of the step in the last visit."""
        self.chunk = chunk
        if self.coroutine is None:
            self._run_step()
            return
        last = chunk == self.chunks - 1
        if self.graph.shared_state is not None:
            self.graph.shared_state.begin()
        with self.random_state.set() if self.random_state else nullcontext():
            while not self.coroutine.ended:
                self.coroutine.resume()
                if not last:
                    return

    def backward(self, chunk: int, defer_weights: bool = False) -> bool:
        """Runs the backward of a visit. Returns True if gradients of weights were deferred."""
        self.chunk = chunk
        with p2p.channel(self.channel):
            deferred = self.graph.backward(self.loss, *self._visits(chunk), defer_weights)
        if chunk == self.chunks - 1:
            self.loss = self.loss.detach()  # frees the graph of the last visit
        return deferred

    def weights(self, chunk: int) -> bool:
        """Computes the gradients that the backward of this visit deferred; False if none."""
        self.chunk = chunk
        with p2p.channel(self.channel):
            return self.graph.backward_weight(*self._visits(chunk))

    def _visits(self, chunk: int) -> tuple[int, int]:
        """Returns the first and the last visit of the graph for a visit of the schedule. If the
        program does not mark the begin of a next visit, both visits run with the later one."""
        first = chunk
        if self.stays_after and not self.graph.found_boundary:
            if chunk in self.stays_after:
                return 0, -1
            first = sum(c not in self.stays_after for c in range(chunk))
        return first, len(self.graph.visits) - 1 if chunk == self.chunks - 1 else first

    def close(self) -> None:
        if self.coroutine is not None:
            self.coroutine.abandon()
        self.graph.close()
        # The micro-batch and its graph form a reference cycle, whose memory only the garbage
        # collector would free.
        self.batch = self.graph = self.coroutine = None  # type: ignore[assignment]

    def _run_step(self) -> None:
        self.first_transfer = p2p.transfers(self.channel)
        with p2p.channel(self.channel), self.graph:
            self.loss = self.step(self.batch)
        loss = self.loss
        if not isinstance(loss, DistTensor):
            raise TypeError(
                f"pipeline.run: the step gave {type(loss).__name__} for micro-batch {self.number}, "
                "and must return its loss, a DistTensor of one element (return loss)"
            )
        if loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
            raise TypeError(
                f"pipeline.run: the step gave {loss.spec!r} for micro-batch {self.number}"
                + ("" if loss.numel() != 1 else ", which does not require grad")
                + ": the loss is one element that depends on parameters"
            )
        if loss.requires_grad:
            self.graph.end(loss)

    def _pause(self) -> None:
        if self.coroutine is not None:
            self.coroutine.pause()

    def _waiting(self, wait: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        value = wait()
        self._note("wait", self.chunk, start)
        return value

    def _note(self, kind: str, chunk: int, start: float) -> None:
        end, rank, stage = time.perf_counter(), world()[0], self.graph.rank_stage()
        event = Event(rank, stage, kind, self.number, chunk, start, end, self.shape)
        for o in self.observers:
            o.end_action(event)
