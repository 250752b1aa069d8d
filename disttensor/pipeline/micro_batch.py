"""One micro-batch on this rank: its program, its graph (the tape), and its actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from disttensor.comm import collectives, p2p
from disttensor.core.mesh import ProcessMesh
from disttensor.observe import here
from disttensor.pipeline.action import Action
from disttensor.pipeline.coroutine import Coroutine
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.tape import MicroBatchGraph
from disttensor.pipeline.timeline import Event
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
Step = Callable[[Any], Any]


class MicroBatch:
    """One micro-batch on this rank: a forward, which may pause between visits, and a backward."""

    def __init__(self, step: Step, batch: Any, number: int, channel: int, chunks: int) -> None:
        self.step, self.batch, self.number, self.chunks = step, batch, number, chunks
        self.channel = channel
        self.begins = 0  # number of transfers on its channel before its program
        self.observers = here()
        self.loss: Any = None
        visits = chunks if chunks > 1 else math.inf
        waiting = self._waiting if self.observers else None
        self.tape = MicroBatchGraph(self._pause, waiting, visits, turns=chunks > 1)
        self.coroutine = Coroutine(self._run_step) if chunks > 1 else None
        self.chunk, self.shape = 0, "loop"
        self.put_off: set[int] = set()
        self.next_to: set[int] = set()

    def at(self, stage: int, plan: Schedule, order: Sequence[ProcessMesh] | None) -> None:
        """Sets this rank's stage and, if given, the ``order`` of visits of the program. After the
        visits in ``next_to`` the program stays on the stage."""
        self.tape.stage, self.tape.order = stage, order
        self.shape = plan.shape if plan.chunks > 1 else "loop"
        ways = [plan.virtual(stage, chunk) for chunk in range(plan.chunks)]
        self.next_to = {c for c, (way, then) in enumerate(pairwise(ways)) if then == way + 1}

    def carry_out(self, action: Action) -> None:
        for o in self.observers:
            o.begin_action(action)
        start, kind = time.perf_counter(), action.kind
        if kind == "F":
            self.forward(action.chunk)
        elif kind == "W":
            if not self.weights(action.chunk):
                return
        elif not self.backward(action.chunk, put_off_weights=kind == "I"):
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
        while not self.coroutine.ended:
            self.coroutine.resume()
            if not last:
                return

    def backward(self, chunk: int, put_off_weights: bool = False) -> bool:
        """Runs the backward of a visit. Returns True if gradients of weights were deferred."""
        self.chunk = chunk
        with p2p.channel(self.channel):
            put_off = self.tape.backward(self.loss, *self._visits(chunk), put_off_weights)
        if chunk == self.chunks - 1:
            self.loss = self.loss.detach()  # frees the graph of the last visit
        if put_off:
            self.put_off.add(chunk)
        return put_off

    def weights(self, chunk: int) -> bool:
        """Computes the gradients that the backward of this visit deferred; False if none."""
        if chunk not in self.put_off:
            return False
        self.chunk = chunk
        self.put_off.discard(chunk)
        with p2p.channel(self.channel):
            self.tape.weights(*self._visits(chunk))
        return True

    def _visits(self, chunk: int) -> tuple[int, int]:
        """Returns the first and the last visit of the tape for a visit of the schedule. If the
        program does not mark the begin of a next visit, both visits run with the later one."""
        first = chunk
        if self.next_to and not self.tape.turned:
            if chunk in self.next_to:
                return 0, -1
            first = sum(c not in self.next_to for c in range(chunk))
        return first, self.tape.visit if chunk == self.chunks - 1 else first

    def close(self) -> None:
        if self.coroutine is not None:
            self.coroutine.abandon()
        self.tape.close()
        # It and its tape form a cycle: without this, garbage collection would free its memory.
        self.batch = self.tape = self.coroutine = None  # type: ignore[assignment]

    def _run_step(self) -> None:
        self.begins = p2p.transfers(self.channel)
        with p2p.channel(self.channel), self.tape:
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
            self.tape.ends(loss)

    def _pause(self) -> None:
        if self.coroutine is not None:
            self.coroutine.pause()

    def _waiting(self, wait: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        value = wait()
        self._note("wait", self.chunk, start)
        return value

    def _note(self, kind: str, chunk: int, start: float) -> None:
        end, rank = time.perf_counter(), collectives.world()[0]
        event = Event(rank, self.tape.place(), kind, self.number, chunk, start, end, self.shape)
        for o in self.observers:
            o.end_action(event)
