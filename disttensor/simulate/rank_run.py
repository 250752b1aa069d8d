"""The recorded step of one rank, cut into the actions of its pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from disttensor.comm.log import CommRecord
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import user_line
from disttensor.observe import Observer
from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule
from disttensor.runtime import current_runtime
from disttensor.simulate.events import (
    Collective,
    Event,
    Gradient,
    Label,
    Message,
    Name,
    Visit,
    Wait,
)
from disttensor.simulate.layers import LayersOfMeshes
from disttensor.simulate.memory import Held, Memory, MemoryChange, summary

Shape = tuple[int, ...]
Entry = Event | MemoryChange | CommRecord
_PEAK = 0.005  # largest difference between two peaks of memory, as a part of the peak


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh and its shape. Unlike a ProcessMesh, it is equal on all simulated
    ranks."""

    ranks: tuple[int, ...]
    shape: Shape

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Grid:
        return cls(mesh.ranks, mesh.shape)

    def coordinates(self) -> dict[int, Shape]:
        """Returns the coordinate of each rank."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))


class StepPart(NamedTuple):
    """A part of a step: an action of pipeline run number ``run``, or (``action`` is None) the part
    before that run. ``log``: its events, memory changes, and records of the engine's collectives.
    """

    run: int
    action: Action | None
    log: list[Entry]

    @property
    def label(self) -> Label:
        return self[:2]


@dataclass
class PipelineRun:
    """A ``pipeline.run`` of the step.

    grids   the meshes of its stages
    orders  the actions of each stage, in order
    stage   the stage of this rank
    begins  where each action of this rank begins, as the number of entries of the step before
    end     where the last one ends; None: not yet
    tags    the number of transfers of each micro-batch before the run
    """

    grids: tuple[Grid, ...] = ()
    orders: tuple[tuple[Action, ...], ...] = ()
    stage: int = 0
    begins: list[tuple[Action, int]] = field(default_factory=list)
    end: int | None = None
    tags: dict[int, int] = field(default_factory=dict)
    has_equal_transfers: bool = False

    @property
    def row(self) -> tuple[Action, ...]:
        """The actions of this rank's stage."""
        return self.orders[self.stage]


@dataclass(frozen=True)
class RankRun:
    """The recorded step of ``rank``.

    held      bytes by category when the step begins
    parts     the step, cut into actions
    runs      its pipeline runs
    warnings  warnings of the program
    layers    the names of the layers on each mesh
    files     bytes of the files that it wrote up to the end of the step, by path
    updates   how often each class of optimizer updated in the step
    exchanged values that it gave to exchanges between ranks, with the lines
    reads     the lines at which the program reads its rank
    """

    rank: int
    held: Held
    parts: list[StepPart]
    runs: list[PipelineRun]
    warnings: list[str]
    layers: LayersOfMeshes = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    exchanged: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int | None:
        """The stage of the rank in the first pipeline run; None if it is in none."""
        grids = self.runs[0].grids if self.runs else ()
        return next((s for s, grid in enumerate(grids) if self.rank in grid.ranks), None)

    @cached_property
    def log(self) -> list[Entry]:
        return [entry for part in self.parts for entry in part.log]

    @cached_property
    def events(self) -> list[Event]:
        return [e for e in self.log if not isinstance(e, MemoryChange | CommRecord)]

    @cached_property
    def comms(self) -> list[CommRecord]:
        return [e for e in self.log if isinstance(e, CommRecord)]

    @cached_property
    def memory(self) -> Memory:
        return summary(self.held, self.log)

    def has_peak_of(self, other: RankRun, but_for: int = 0) -> bool:
        """Returns True if the peaks of memory of both are about equal, or differ by no more than
        ``but_for`` bytes."""
        off = abs(self.memory.peak - other.memory.peak)
        return off <= max(_PEAK * other.memory.peak, but_for)

    def labels(self, stage: int) -> Iterator[Label]:
        """Yields the labels of the parts of a stage, in order."""
        for part in self.parts:
            if part.action is None:
                yield part.label
                if part.run < len(self.runs):
                    yield from ((part.run, action) for action in self.runs[part.run].orders[stage])


class ActionRecorder(Observer):
    """Records where the actions of the pipeline runs of one rank begin, and its gradients.

    Args:
        now: returns the number of entries of the step, or None while nothing is recorded.
        note: receives a Visit for each action, and a Gradient for each gradient of sharded
            parameters.
    """

    sees_modules = True

    def __init__(self, now: Callable[[], int | None], note: Callable[[Event], None]) -> None:
        self.now, self.note = now, note
        self.runs: list[PipelineRun] = []
        self._open: PipelineRun | None = None
        self._tags: dict[int, int] = {}

    def accumulate_grad(self, params: Sequence[Any]) -> None:
        if any(p.axis is not None for p in params):
            self.note(Gradient(user_line()))

    def begin_action(self, action: Action) -> None:
        run, position = self._opened(), self.now()
        if position is not None:
            run.begins.append((action, position))
            self.note(Visit("forward" if action.kind == "F" else "backward", user_line()))

    def begin_run(self, order: Sequence[Any], schedule: Schedule, stage: int) -> None:
        run = self._opened()
        run.grids, run.orders, run.stage = tuple(map(Grid.of, order)), schedule.orders, stage
        run.tags = {n: self._tags.get(n + 1, 0) for n in range(schedule.micro_batches)}

    def end_run(self) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        tags = current_runtime().tags
        used = {n: tags.get(n + 1, 0) - before for n, before in run.tags.items()}
        run.end, run.has_equal_transfers = self.now(), len(set(used.values())) == 1
        for n in used:  # a micro-batch that did not run has as many as the others
            tags[n + 1] = run.tags[n] + (used[n] or max(used.values()))

    def _opened(self) -> PipelineRun:
        if self._open is None:
            self._open, self._tags = PipelineRun(), dict(current_runtime().tags)
            if self.now() is not None:
                self.runs.append(self._open)
        return self._open


def cut_step(runs: Sequence[PipelineRun], log: Sequence[Entry]) -> Iterator[StepPart]:
    """Yields the parts of a step. Storages and works that are older than the step have negative
    numbers."""
    works, blocks = dict[Name, Name](), dict[Name, Name]()

    def part(number: int, action: Action | None, begin: int, end: int) -> StepPart:
        out = StepPart(number, action, [])
        label, made = out.label, (len(works), len(blocks))
        for e in log[begin:end]:
            if isinstance(e, Collective | Message):
                works[e.work] = label, len(works) - made[0]
            if isinstance(e, Collective | Message | Wait):
                e = e._replace(work=works.get(e.work, -1))
            elif isinstance(e, MemoryChange) and isinstance(e.block, int) and e.block >= 0:
                e = e._replace(block=blocks.setdefault(e.block, (label, len(blocks) - made[1])))
            out.log.append(e)
        return out

    at = 0
    for number, run in enumerate(runs):
        if not run.grids or run.end is None:  # forwards only
            continue
        begins = [begin for _, begin in run.begins]
        yield part(number, None, at, begins[0])
        for (action, begin), end in zip(run.begins, [*begins[1:], run.end], strict=True):
            yield part(number, action, begin, end)
        at = run.end
    yield part(len(runs), None, at, len(log))
