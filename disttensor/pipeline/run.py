"""Runs a schedule: the forwards and backwards of all micro-batches, in the order of this rank's
stage.

Every rank runs the same step on every micro-batch. The stages follow from the meshes of its
tensors. A stage waits only for the messages that it receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from disttensor import callbacks
from disttensor.autograd.accumulation import BackwardContext, backward_context
from disttensor.checks import check_callable, check_sequence
from disttensor.comm import lone_failure, p2p
from disttensor.comm.process_group import world
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.observe import observers_of_thread
from disttensor.pipeline.action import Action
from disttensor.pipeline.early_receives import EarlyReceives
from disttensor.pipeline.micro_batch import MicroBatch, Step
from disttensor.pipeline.random_state import RandomState, end_run, seeds_of_run
from disttensor.pipeline.schedule import SHAPES, Schedule, route
from disttensor.pipeline.schedules import NAMES, Maker, named
from disttensor.pipeline.shared_state import SharedState
from disttensor.tensor.grad import update_shown


def run(
    step: Step,
    micro_batches: Iterable[Any],
    schedule: str | Schedule | Maker = "1f1b",
    *,
    stages: Sequence[ProcessMesh] | None = None,
) -> list[Any]:
    """Runs ``step`` and a backward for each micro-batch, and returns the detached losses; gradients
    add up in the parameters' ``grad``.

    It equals ``[step(m) for m in micro_batches]`` with ``loss.backward()`` each, in another order.
    ``step`` is the ordinary global program of one micro-batch: it brings tensors from stage to
    stage with ``reshard`` (or ``pipeline.split`` does) and returns a loss of one element.
    Micro-batches may differ in shape. Under ``no_grad`` there are forwards only.

    ``schedule``: "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "interleaved_zero_bubble",
    "zbv", "dualpipev", a Schedule, or a function (stages, micro_batches, chunks) that makes one.
    ``stages``: the meshes in the order in which the program visits them. By default a run of the
    first micro-batch finds the order. A schedule with several visits of a mesh needs it, as
    ``[mesh0, mesh1, mesh0, mesh1]``, or there and back, ``[mesh0, mesh1, mesh1, mesh0]``. Raises
    ValueError for a schedule that does not fit or can never finish, before any message is sent, and
    TypeError for a step that returns no loss.

    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> losses = pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0], schedule="gpipe")
    >>> [loss.item() for loss in losses], w.grad.tolist()
    ([3.0, 6.0], [3.0, 3.0, 3.0])
    """
    check_callable("pipeline.run: step", step, "a function of a micro-batch")
    batches = check_sequence("pipeline.run: micro_batches", micro_batches, "an iterable")
    if not batches:
        raise ValueError("pipeline.run: there are no micro-batches")
    visits: list[ProcessMesh] | None = None
    meshes: list[ProcessMesh] | None = None
    chunks, shapes = 1, list(SHAPES)
    if stages is not None:
        visits, meshes, chunks, shapes = _visits(stages)
    builtin = NAMES.get(schedule) if isinstance(schedule, str) else None
    if builtin and builtin.needs_stages and meshes is None:
        raise ValueError(
            f"pipeline.run: {schedule!r} visits every mesh several times: give the order, as "
            f"stages={_EXAMPLES[builtin.shape]}"
        )
    if meshes is not None:
        made = named(schedule, len(meshes), len(batches), chunks)
        if chunks > 1 and made.shape not in shapes:
            raise ValueError(
                f"pipeline.run: stages={list(stages or ())} is not an order in which the schedule "
                f"visits meshes, as stages={_EXAMPLES[made.shape]}"
            )
    elif isinstance(schedule, Schedule):
        named(schedule, schedule.stages, len(batches), schedule.chunks)
        chunks = schedule.chunks
    elif builtin is None and not callable(schedule):
        named(schedule, 1, len(batches))
    seeds = seeds_of_run() if chunks > 1 else None
    running = [
        MicroBatch(step, batch, i, channel, chunks, RandomState(seeds, i) if seeds else None)
        for i, (batch, channel) in enumerate(zip(batches, p2p.channels(len(batches)), strict=True))
    ]
    shared_state = SharedState() if chunks > 1 and torch.is_grad_enabled() else None
    for micro_batch in running:
        micro_batch.graph.shared_state = shared_state
    may_return = bool(builtin and builtin.may_return)
    # If all forwards are one visit, the program may return to a mesh: no backward is in between.
    visits = None if may_return and chunks == 1 else visits
    failed = False
    try:
        _carry_out(running, schedule, meshes, chunks, visits, may_return=may_return)
    except BaseException as error:
        p2p.retire_channels(len(running))
        lone_failure.note_failed_run(error)
        failed = True
        raise
    finally:
        for o in observers_of_thread():
            o.end_run()
        for micro_batch in running:
            micro_batch.close()
        if failed and shared_state is not None:
            shared_state.restore()
    end_run(m.random_state for m in running if m.random_state)
    update_shown()
    losses = [micro_batch.loss for micro_batch in running]
    first = next(loss for loss in losses if loss is not None)  # see callbacks.choose_actions
    return [(first if loss is None else loss).detach() for loss in losses]


def _carry_out(
    running: list[MicroBatch], schedule: Any, meshes: Any, chunks: int,
    visits: Sequence[ProcessMesh] | None, *, may_return: bool,
) -> None:  # fmt: skip
    rank = world()[0]

    def stage_in(meshes: Any) -> int:
        return next((s for s, mesh in enumerate(meshes) if rank in mesh.ranks), 0)

    if not torch.is_grad_enabled():
        for micro_batch in running:
            micro_batch.graph.stage = stage_in(meshes) if meshes else None
            micro_batch.carry_out(Action("F", micro_batch.number, chunks - 1))
        return
    done: set[Action] = set()
    if meshes is None:  # the first micro-batch shows them
        _check_common_start(schedule)
        first = running[0]
        first.carry_out(Action("F", 0))
        done.add(Action("F", 0))
        meshes = first.graph.meshes
        if first.graph.first_return is not None and not may_return:
            src, dst = first.graph.first_return
            raise ValueError(
                "pipeline.run: the step comes back to an earlier mesh "
                f"(from {src!r} to {dst!r}), where each stage waits for a later one. Use "
                "'interleaved_1f1b' with stages=[...] in the order of the visits, or 'gpipe'"
            )
    plan = named(schedule, max(1, len(meshes)), len(running), chunks)
    _check_channels(running, plan)
    stage = stage_in(meshes)
    for micro_batch in running:
        micro_batch.at(stage, plan, visits)
    for o in observers_of_thread():
        o.begin_run(meshes, plan, stage)
    row = callbacks.choose_actions.get()(plan.orders[stage])
    # The last backward of each visit. I does not count, as gradients of weights come after it.
    final = {a.chunk: a for a in row if a.kind in "BW"}
    early_receives = EarlyReceives(row, running)
    for action in row:
        kind, number, chunk = action
        if kind != "F":
            with backward_context(BackwardContext(action is final.get(chunk))):
                running[number].carry_out(action)
            continue
        if action not in done:
            running[number].carry_out(action)
        if not chunk:
            early_receives.post_next(running[number])


def _check_channels(running: Sequence[MicroBatch], plan: Schedule) -> None:
    """Raises ValueError if forwards of two micro-batches with one channel overlap on a stage: ranks
    would number their transfers differently."""
    channels = len({micro_batch.channel for micro_batch in running})
    for row in plan.orders if channels < len(running) else ():
        latest: dict[int, int] = {}  # the last micro-batch of each channel so far
        for action in (action for action in row if action.kind == "F"):
            number, channel = action.micro_batch, running[action.micro_batch].channel
            if latest.get(channel, 0) > number:
                raise ValueError(
                    f"pipeline.run: {len(running)} micro-batches: this schedule has more than "
                    f"{channels} in progress, whose messages could not be told apart (it begins "
                    f"micro-batch {latest[channel]} before the last visit of micro-batch "
                    f"{number}). Run them in parts of at most {channels}"
                )
            latest[channel] = number


_EXAMPLES = {
    "loop": "[mesh0, mesh1, mesh0, mesh1]",
    "v": "[mesh0, mesh1, mesh1, mesh0]",
}


def _visits(stages: Any) -> tuple[list[ProcessMesh], list[ProcessMesh], int, list[str]]:
    """Returns the meshes in the order of their visits, the meshes without repetition, the number of
    visits of each, and possible shapes."""
    listed = check_sequence("pipeline.run: stages", stages, "a list of meshes")
    visits = [as_mesh("pipeline.run: stages: entry", mesh) for mesh in listed]
    meshes = list(dict.fromkeys(visits))
    chunks = len(visits) // len(meshes) if meshes else 0
    shapes = [shape for shape in SHAPES if route(shape, meshes, chunks) == visits]
    if not meshes or not shapes:
        raise ValueError(
            f"pipeline.run: stages={visits}: the meshes in the order of their visits, each "
            f"as often as the others, as in {_EXAMPLES['loop']} or {_EXAMPLES['v']}"
        )
    return visits, meshes, chunks, shapes


def _check_common_start(schedule: Any) -> None:
    if isinstance(schedule, Schedule) and any(
        not row or row[0] != Action("F", 0) for row in schedule.orders
    ):
        raise ValueError(
            "pipeline.run: the schedule does not begin with F0 on every stage, so the stages "
            "cannot be found by running it: give stages=[mesh0, mesh1, ...]"
        )
