"""Carrying out a schedule: the forwards and backwards of all micro-batches, in the order of this
rank's stage.

Every rank runs the same step on every micro-batch. The stages follow from the meshes that its
tensors come to; a stage waits for what it receives, and for nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from disttensor import arguments
from disttensor.autograd.accumulation import backward_context
from disttensor.comm import collectives, p2p
from disttensor.mesh import ProcessMesh, a_mesh
from disttensor.pipeline.coroutine import Coroutine
from disttensor.pipeline.recorder import note
from disttensor.pipeline.schedule import Action, Schedule
from disttensor.pipeline.schedules import NAMES, Maker, named
from disttensor.pipeline.tape import Tape
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
Step = Callable[[Any], Any]


def run(
    step: Step,
    micro_batches: Iterable[Any],
    schedule: str | Schedule | Maker = "1f1b",
    *,
    stages: Sequence[ProcessMesh] | None = None,
) -> list[Any]:
    """The losses of ``step(micro_batch)`` for each micro-batch, detached; gradients add up in the
    parameters' ``grad``.

    It is ``[step(m) for m in micro_batches]`` with ``loss.backward()`` for each, in another order.
    ``step`` is the ordinary global program of one micro-batch: it brings tensors from stage to
    stage with ``reshard`` (or ``pipeline.split`` does) and returns a loss of one element.
    Micro-batches may differ in shape. Under ``no_grad`` there are forwards only.

    ``schedule``: "gpipe", "1f1b", "interleaved_1f1b", a Schedule, or a function (stages,
    micro_batches, chunks) that makes one. ``stages``: the meshes in the order in which the program
    visits them. Without it that order is found by running the first micro-batch; a schedule with
    several visits of a mesh needs it: ``[mesh0, mesh1, mesh0, mesh1]``. Raises ValueError for a
    schedule that does not fit or can never finish, before anything is sent, and TypeError for a
    step that returns no loss.

    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> losses = pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0], schedule="gpipe")
    >>> [loss.item() for loss in losses], w.grad.tolist()
    ([3.0, 6.0], [3.0, 3.0, 3.0])
    """
    arguments.function("pipeline.run: step", step, "a function of a micro-batch")
    batches = arguments.listed("pipeline.run: micro_batches", micro_batches, "an iterable")
    if not batches:
        raise ValueError("pipeline.run: there are no micro-batches")
    order, chunks = (None, 1) if stages is None else _visits(stages)
    builtin = NAMES.get(schedule) if isinstance(schedule, str) else None
    if builtin and builtin.needs_stages and order is None:
        raise ValueError(
            f"pipeline.run: {schedule!r} visits every mesh several times: say in which order, "
            "with stages=[mesh0, mesh1, mesh0, mesh1]"
        )
    if order is not None:
        named(schedule, len(order), len(batches), chunks)
    elif isinstance(schedule, Schedule):
        named(schedule, schedule.stages, len(batches), schedule.chunks)
        chunks = schedule.chunks
    elif builtin is None and not callable(schedule):
        named(schedule, 1, len(batches))
    running = [_MicroBatch(step, batch, i, chunks) for i, batch in enumerate(batches)]
    try:
        _carry_out(
            running, schedule, order, chunks, may_return=bool(builtin and builtin.may_return)
        )
    finally:
        for micro_batch in running:
            micro_batch.close()
    return [micro_batch.loss.detach() for micro_batch in running]


def _carry_out(
    running: list[_MicroBatch], schedule: Any, order: Any, chunks: int, *, may_return: bool
) -> None:
    if not torch.is_grad_enabled():
        for micro_batch in running:
            micro_batch.carry_out(Action("F", micro_batch.number, chunks - 1))
        return
    done: set[Action] = set()
    if order is None:  # the first micro-batch shows which meshes there are
        _check_common_start(schedule)
        first = running[0]
        first.carry_out(Action("F", 0))
        done.add(Action("F", 0))
        order = first.tape.meshes
        if first.tape.returns and not may_return:
            raise ValueError(
                "pipeline.run: the step comes back to an earlier mesh "
                f"({first.tape.returns[0]}), where each stage waits for a later one. Use "
                "'interleaved_1f1b' with stages=[...] in the order of the visits, or 'gpipe'"
            )
    plan = named(schedule, max(1, len(order)), len(running), chunks)
    rank = collectives.world()[0]
    mine = [s for s, mesh in enumerate(order) if rank in mesh.ranks]
    stage = mine[0] if mine else 0
    for micro_batch in running:
        micro_batch.stage = stage
    row = plan.orders[stage]
    final = {a.chunk: a for a in row if a.kind == "B"}  # the last backward of each visit
    for action in row:
        if action not in done:
            with backward_context(is_last=action is final.get(action.chunk)):
                running[action.micro_batch].carry_out(action)


def _visits(stages: Sequence[ProcessMesh]) -> tuple[list[ProcessMesh], int]:
    """The meshes without repetition, and how often each is visited."""
    for mesh in arguments.listed("pipeline.run: stages", stages, "a list of meshes"):
        a_mesh("pipeline.run: stages: entry", mesh)
    order = list(dict.fromkeys(stages))
    chunks = len(stages) // len(order) if order else 0
    if not order or list(stages) != order * chunks:
        raise ValueError(
            f"pipeline.run: stages={list(stages)}: the meshes in the order of their visits, each "
            "as often as the others, as in [mesh0, mesh1, mesh0, mesh1]"
        )
    return order, chunks


def _check_common_start(schedule: Any) -> None:
    if isinstance(schedule, Schedule) and any(
        not row or row[0] != Action("F", 0) for row in schedule.orders
    ):
        raise ValueError(
            "pipeline.run: the schedule does not begin with F0 on every stage, so the stages "
            "cannot be found by running it: give stages=[mesh0, mesh1, ...]"
        )


class _MicroBatch:
    """One micro-batch on this rank: a forward, which may pause between visits, and a backward."""

    def __init__(self, step: Step, batch: Any, number: int, chunks: int) -> None:
        self.step, self.batch, self.number, self.chunks = step, batch, number, chunks
        self.stage = 0
        self.loss: Any = None
        self.tape = Tape(self._pause, self._waiting, visits=chunks if chunks > 1 else math.inf)
        self.coroutine = Coroutine(self._run_step) if chunks > 1 else None
        self.chunk = 0

    def carry_out(self, action: Action) -> None:
        start = time.perf_counter()
        (self.forward if action.kind == "F" else self.backward)(action.chunk)
        note(action.kind, self.stage, self.number, action.chunk, start)

    def forward(self, chunk: int) -> None:
        """Go on to the end of this visit, or of the step in the last visit of the schedule."""
        self.chunk = chunk
        if self.coroutine is None:
            self._run_step()
            return
        last = chunk == self.chunks - 1
        while not self.coroutine.ended:
            self.coroutine.resume()
            if not last:
                return

    def backward(self, chunk: int) -> None:
        self.chunk = chunk
        last = self.tape.visit if chunk == self.chunks - 1 else chunk
        with p2p.channel(self.channel):
            self.tape.backward(self.loss, chunk, last)
        if chunk == self.chunks - 1:
            self.loss = self.loss.detach()  # frees the graph of the last visit

    def close(self) -> None:
        if self.coroutine is not None:
            self.coroutine.abandon()

    @property
    def channel(self) -> int:
        return 1 + self.number % (p2p.CHANNELS - 1)

    def _run_step(self) -> None:
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

    def _pause(self) -> None:
        if self.coroutine is not None:
            self.coroutine.pause()

    def _waiting(self, wait: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        value = wait()
        note("wait", self.stage, self.number, self.chunk, start)
        return value
