"""Which events of a step belong to which forward or backward of a pipeline's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disttensor import pipeline
from disttensor.simulate.grid import Grid

Action = pipeline.Action


class Mark(NamedTuple):
    """A point of a step: how many events, changes of memory and CommRecords there are so far."""

    events: int
    changes: int
    comms: int


class Piece(NamedTuple):
    """What a rank does from ``start`` to ``end``: an action of a pipeline run, or (None) what lies
    between two of them."""

    run: int
    action: Action | None
    start: Mark
    end: Mark


@dataclass
class PipelineRun:
    """A ``pipeline.run`` of the step: the meshes of its stages, what each does in order, and where
    each action of this rank begins."""

    grids: tuple[Grid, ...] = ()
    orders: tuple[tuple[Action, ...], ...] = ()
    begins: list[tuple[Action, Mark]] = field(default_factory=list)
    end: Mark | None = None


class Visits(pipeline.Recorder):
    """Hears of the pipeline runs of one rank. ``now``: the Mark of this moment, None while nothing
    is recorded."""

    def __init__(self, now: Callable[[], Mark | None]) -> None:
        super().__init__()
        self.now = now
        self.runs: list[PipelineRun] = []
        self._open: PipelineRun | None = None

    def begins(self, action: Action) -> None:
        mark = self.now()
        if mark is not None:
            self._opened().begins.append((action, mark))

    def follows(self, order: Sequence[Any], schedule: pipeline.Schedule) -> None:
        if self.now() is not None:
            run = self._opened()
            run.grids, run.orders = tuple(map(Grid.of, order)), schedule.orders

    def ends(self) -> None:
        if self._open is not None:
            self._open.end, self._open = self.now(), None

    def _opened(self) -> PipelineRun:
        if self._open is None:
            self._open = PipelineRun()
            self.runs.append(self._open)
        return self._open


def pieces(runs: Sequence[PipelineRun], last: Mark) -> Iterator[Piece]:
    """All of a step, cut into actions and what lies between pipeline runs. ``last``: its end."""
    at = Mark(0, 0, 0)
    for number, run in enumerate(runs):
        if not run.grids or run.end is None:  # forwards only
            continue
        yield Piece(number, None, at, run.begins[0][1])
        ends = [*(mark for _, mark in run.begins[1:]), run.end]
        for (action, start), end in zip(run.begins, ends, strict=True):
            yield Piece(number, action, start, end)
        at = run.end
    yield Piece(len(runs), None, at, last)
