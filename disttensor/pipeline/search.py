"""Searches a schedule for given costs greedily: the action that can start earliest starts first.

Each attempt goes through time once and gives a free stage the action that can start there soonest:
an I, an F if memory allows it, or a W if no other action could start before the end of the W.
Attempts differ in the preference between actions that could start at once, and in their memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from disttensor.checks import check_int, check_type
from disttensor.pipeline.action import Action
from disttensor.pipeline.costs import Costs
from disttensor.pipeline.schedule import SHAPES, Schedule, StageClock
from disttensor.pipeline.schedules import NAMES
from disttensor.pipeline.steady import sizes
from disttensor.progress import bar


def search(
    costs: Costs, memory: int | Sequence[int] | None = None, *,
    stages: int, micro_batches: int, chunks: int = 1, shape: str = "loop",
) -> Schedule:  # fmt: skip
    """Returns the schedule that takes the least time by ``costs``, of the schedules tried and the
    named ones. A faster one may exist.

    ``memory``: most visits whose activations a stage may hold (``Schedule.peak``), for all or for
    each stage; None: as many as the first stage of "1f1b", stages times chunks. A schedule depends
    on the arguments alone, so all ranks find the same one.

    >>> costs = pipeline.Costs(forward=1, inputs=1, weights=1)
    >>> found = pipeline.search(costs, memory=3, stages=2, micro_batches=4)
    >>> costs.span(found), costs.span(pipeline.zero_bubble(2, 4)), found.peak(0)
    (13.0, 13.0, 2)

    Raises ValueError for a memory that is too small for any schedule.
    """
    check_type("search: costs", costs, Costs, "Costs")
    sizes(stages, micro_batches, chunks)
    if shape not in SHAPES:
        raise ValueError(f"search: shape={shape!r}: 'loop' or 'v' is expected")
    costs.check(stages * chunks)
    limits = _memory_limits(memory, stages, chunks)
    found: dict[Schedule, None] = {}
    for made in _with_names(stages, micro_batches, chunks, shape):
        found[made] = None
    tries = [*product((0, 1, stages // 2), (False, True), (False, True), (0.0, 0.5, 1.0))]
    with bar("searching", len(tries), "schedules") as advance:
        for less, forward_first, late_first, patience in tries:
            preference = _Preference(forward_first, late_first, patience)
            smaller = [max(chunks, n - less) for n in limits]
            rows = _GreedyPass(costs, smaller, stages, micro_batches, chunks, shape).rows(
                preference
            )
            if rows is not None:
                found[Schedule(rows, shape)] = None
            advance()
    fits = [s for s in found if all(s.peak(i) <= n for i, n in enumerate(limits))]
    if not fits:
        raise ValueError(f"search: memory={memory!r}: no schedule was found that needs no more")
    return min(fits, key=lambda s: (costs.span(s), sum(map(s.peak, range(stages)))))


class _Preference(NamedTuple):
    forward_first: bool  # before an I that could start as early
    late_first: bool  # the last visit first, of the visits that could start as early
    patience: float  # fraction of its time by which a W may delay another action


class _GreedyPass:
    """One pass through time. ``live`` counts the visits that a stage holds."""

    def __init__(
        self, costs: Costs, memory_limit: Sequence[int], stages: int, micro_batches: int,
        chunks: int, shape: str,
    ) -> None:  # fmt: skip
        self.costs, self.memory_limit = costs, memory_limit
        self.micro_batches, self.chunks = micro_batches, chunks
        route = Schedule([[Action("F", 0, chunks - 1)]] * stages, shape)
        self.clock = StageClock(route, costs.transfer)
        self.virtual = [[route.virtual(s, c) for c in range(chunks)] for s in range(stages)]
        self.live = [0] * stages
        self.done = [{(kind, c): 0 for kind in "FI" for c in range(chunks)} for _ in range(stages)]
        self.deferred: list[deque[Action]] = [deque() for _ in range(stages)]
        self.made: list[list[Action]] = [[] for _ in range(stages)]

    def rows(self, preference: _Preference) -> list[list[Action]] | None:
        """Returns the order of each stage, or None if no stage can go on in this memory."""
        for _ in range(3 * self.micro_batches * self.chunks * len(self.made)):
            choices = [
                (*found, stage)
                for stage in range(len(self.made))
                if (found := self._choice(stage, preference)) is not None
            ]
            if not choices:
                return None
            _, action, stage = min(choices, key=lambda choice: (choice[0], choice[2]))
            self._run(stage, action)
        return self.made

    def _choice(self, stage: int, preference: _Preference) -> tuple[float, Action] | None:
        def key(ready: tuple[float, Action]) -> tuple[float, bool, int]:
            start, (kind, _, chunk) = ready
            visit = -chunk if preference.late_first else chunk
            return start, (kind == "F") is not preference.forward_first, visit

        best = min(self._ready(stage), key=key, default=None)
        if self.deferred[stage]:
            w = self.deferred[stage][0]
            takes = self.costs.of_action(self.virtual[stage][w.chunk], "W")
            free = self.clock.free[stage]
            if best is None or free + takes * (1 - preference.patience) < best[0]:
                return free, w
        return best

    def _ready(self, stage: int) -> Iterator[tuple[float, Action]]:
        """Yields the actions other than W that could come next, and when they could start."""
        done = self.done[stage]
        for (kind, chunk), m in done.items():
            if kind == "F":
                # later visits of the same micro-batch need memory as well
                held = self.live[stage] + self.chunks - 1 - chunk
                if m == self.micro_batches or held >= self.memory_limit[stage]:
                    continue
            elif m >= done["F", chunk]:
                continue
            start = self.clock.earliest(stage, Action(kind, m, chunk))
            if start is not None:
                yield start, Action(kind, m, chunk)

    def _run(self, stage: int, action: Action) -> None:
        kind, _, chunk = action
        self.clock.run(stage, action, self.costs.of_action(self.virtual[stage][chunk], kind))
        self.made[stage].append(action)
        if kind == "W":
            self.deferred[stage].popleft()
            self.live[stage] -= 1
            return
        self.done[stage][kind, chunk] += 1
        if kind == "I":
            self.deferred[stage].append(action._replace(kind="W"))
        else:
            self.live[stage] += 1


def _with_names(stages: int, micro_batches: int, chunks: int, shape: str) -> Iterator[Schedule]:
    for builtin in NAMES.values():
        try:
            made = builtin.make(stages, micro_batches, chunks)
        except ValueError:  # visits a mesh more or less often
            continue
        if made.shape == shape or chunks == 1:
            yield made


def _memory_limits(memory: int | Sequence[int] | None, stages: int, chunks: int) -> list[int]:
    if memory is None:
        return [stages * chunks] * stages
    if isinstance(memory, (list, tuple)):
        limits = [check_int("search: memory: entry", n, 1) for n in memory]
        if len(limits) != stages:
            raise ValueError(
                f"search: memory={memory!r}: one number for each of {stages} stages, or one for all"
            )
    else:
        limits = [check_int("search: memory", memory, 1)] * stages
    if min(limits) < chunks:
        raise ValueError(
            f"search: memory={memory!r}: a micro-batch visits a stage {chunks} times before its "
            f"first backward, so {chunks} visits are the least"
        )
    return limits
