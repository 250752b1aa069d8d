"""Which events of a step belong to which forward or backward of a pipeline's micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disttensor import pipeline
from disttensor.errors import user_line
from disttensor.runtime import current_runtime
from disttensor.simulate.events import Visit
from disttensor.simulate.few_micro_batches import left_out
from disttensor.simulate.grid import Grid
from disttensor.torch_private import next_node

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
    """A ``pipeline.run`` of the step: the meshes of its stages, what each does in order, this
    rank's stage, and where each of its actions begins. ``tags``: the transfers of each micro-batch
    so far; ``nodes``: of autograd, made before each action; ``left_out``: micro-batches that were
    not run."""

    grids: tuple[Grid, ...] = ()
    orders: tuple[tuple[Action, ...], ...] = ()
    stage: int = 0
    begins: list[tuple[Action, Mark]] = field(default_factory=list)
    end: Mark | None = None
    tags: dict[int, int] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    left_out: dict[int, int] = field(default_factory=dict)
    alike: bool = False

    def _alike(self) -> bool:
        """Does the program make as many nodes and transfers for each micro-batch?"""
        made: dict[int, Counter[int]] = {}
        for (action, _), begin, end in zip(self.begins, self.nodes, self.nodes[1:], strict=False):
            if action.kind == "F":
                made.setdefault(action.chunk, Counter())[end - begin] += 1
        return all(len(counts) == 1 for counts in made.values())


class Visits(pipeline.Recorder):
    """Hears of the pipeline runs of one rank. ``now``: the Mark of this moment, None while nothing
    is recorded. ``note``: is given a Visit for each action. ``few``: no more micro-batches run than
    show what all of them do, and before anything is recorded only those at the ends."""

    def __init__(
        self, now: Callable[[], Mark | None], note: Callable[[Visit], None], few: bool = False
    ) -> None:
        super().__init__()
        self.now, self.note, self.few = now, note, few
        self.runs: list[PipelineRun] = []
        self._open: PipelineRun | None = None
        self._tags: dict[int, int] = {}

    def begins(self, action: Action) -> None:
        run, mark = self._opened(), self.now()
        if mark is not None:
            run.begins.append((action, mark))
            run.nodes.append(next_node())
            self.note(Visit("forward" if action.kind == "F" else "backward", user_line()))

    def follows(
        self, order: Sequence[Any], schedule: pipeline.Schedule, stage: int
    ) -> Mapping[int, int]:
        run = self._opened()
        run.grids, run.orders, run.stage = tuple(map(Grid.of, order)), schedule.orders, stage
        run.tags = {n: self._tags.get(n + 1, 0) for n in range(schedule.micro_batches)}
        if self.few:
            run.left_out = left_out(schedule.orders[stage], shown=self.now() is not None)
        return run.left_out

    def ends(self) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        tags = current_runtime().tags
        used = {n: tags.get(n + 1, 0) - before for n, before in run.tags.items()}
        for number, other in run.left_out.items():
            tags[number + 1] = run.tags[number] + used[other]
        run.end = self.now()
        if run.end is not None:
            run.nodes.append(next_node())
            run.alike = len(set(used.values())) == 1 and run._alike()

    def _opened(self) -> PipelineRun:
        if self._open is None:
            self._open, self._tags = PipelineRun(), dict(current_runtime().tags)
            if self.now() is not None:
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
