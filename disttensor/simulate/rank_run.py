"""The recorded step of one rank, cut into the actions of its pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from disttensor import callbacks, pipeline
from disttensor.comm.log import CommRecord
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import user_line
from disttensor.observe import Observer
from disttensor.runtime import current_runtime
from disttensor.simulate.events import Event, Gradient, Visit
from disttensor.simulate.layers import LayersOfMeshes
from disttensor.simulate.memory import Held, Memory, MemoryChange, summary
from disttensor.torch_private import next_number

Action = pipeline.Action
Shape = tuple[int, ...]


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
        out = {}
        for i, rank in enumerate(self.ranks):
            coordinate = []
            for n in reversed(self.shape):
                i, at = divmod(i, n)
                coordinate.append(at)
            out[rank] = tuple(reversed(coordinate))
        return out


class Position(NamedTuple):
    """A moment of a step: the number of events, memory changes and CommRecords so far."""

    events: int
    changes: int
    comms: int


class ActionSlice(NamedTuple):
    """The part of a step from ``start`` to ``end``: an action of pipeline run number ``run``, or
    (``action`` is None) the part before that run."""

    run: int
    action: Action | None
    start: Position
    end: Position


@dataclass
class PipelineRun:
    """A ``pipeline.run`` of the step.

    grids     the meshes of its stages
    orders    the actions of each stage, in order
    stage     the stage of this rank
    begins    where each action of this rank begins
    tags      the number of transfers of each micro-batch before the run
    nodes     the number of autograd nodes before each action
    left_out  micro-batches that did not run, each with a similar one that did
    """

    grids: tuple[Grid, ...] = ()
    orders: tuple[tuple[Action, ...], ...] = ()
    stage: int = 0
    begins: list[tuple[Action, Position]] = field(default_factory=list)
    end: Position | None = None
    tags: dict[int, int] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    left_out: dict[int, int] = field(default_factory=dict)
    has_equal_micro_batches: bool = False

    def makes_equal_nodes(self) -> bool:
        """Returns True if the forwards of all micro-batches make the same number of autograd
        nodes."""
        made: dict[int, set[int]] = {}
        for (action, _), begin, end in zip(self.begins, self.nodes, self.nodes[1:], strict=False):
            if action.kind == "F":
                made.setdefault(action.chunk, set()).add(end - begin)
        return all(len(counts) == 1 for counts in made.values())


@dataclass(frozen=True)
class RankRun:
    """The recorded step of ``rank``.

    held           bytes by category when the step begins
    changes        changes of its memory
    warnings       warnings of the program
    slices         the step, cut into actions
    blocks_before  storages with a lower number existed before the step
    layers         the names of the layers on each mesh
    """

    rank: int
    events: list[Event]
    comms: list[CommRecord]
    held: Held
    changes: list[MemoryChange]
    warnings: list[str]
    slices: tuple[ActionSlice, ...]
    runs: list[PipelineRun]
    blocks_before: int = 0
    layers: LayersOfMeshes = field(default_factory=dict)

    @property
    def stage(self) -> int | None:
        """The stage of the rank in the first pipeline run; None if it is in none."""
        grids = self.runs[0].grids if self.runs else ()
        return next((s for s, grid in enumerate(grids) if self.rank in grid.ranks), None)

    def cut(self, part: ActionSlice) -> tuple[list[Event], list[MemoryChange], list[CommRecord]]:
        """Returns the events, memory changes and CommRecords of a slice."""
        a, b = part.start, part.end
        return (
            self.events[a.events : b.events], self.changes[a.changes : b.changes],
            self.comms[a.comms : b.comms],
        )  # fmt: skip

    def held_at_end(self) -> Held:
        """Returns the bytes by category when the step ends."""
        out = dict(self.held)
        for change in self.changes:
            out[change.category] += change.nbytes
        return out

    @cached_property
    def memory(self) -> Memory:
        return summary(self.held, self.changes)


class StepBuilder:
    """Builds a step from slices of recorded ones. ``like``: the run whose other fields are kept."""

    def __init__(self, like: RankRun) -> None:
        self._run = replace(like, events=[], changes=[], comms=[])
        self._slices: list[ActionSlice] = []

    def add(
        self, part: ActionSlice, action: Action | None, events: Iterable[Event],
        changes: Iterable[MemoryChange], comms: Iterable[CommRecord],
    ) -> None:  # fmt: skip
        """Appends a slice with the number of ``part``. ``changes`` have the event numbers of
        ``part``."""
        start = self._position()
        shift = start.events - part.start.events
        self._run.events.extend(events)
        self._run.changes.extend(c._replace(event=c.event + shift) for c in changes)
        self._run.comms.extend(comms)
        self._slices.append(ActionSlice(part.run, action, start, self._position()))

    def build(self) -> RankRun:
        return replace(self._run, slices=tuple(self._slices))

    def _position(self) -> Position:
        return Position(len(self._run.events), len(self._run.changes), len(self._run.comms))


class ActionRecorder(Observer):
    """Records where the actions of the pipeline runs of one rank begin, and its gradients.

    Args:
        now: returns the current Position, or None while nothing is recorded.
        note: receives a Visit for each action, and a Gradient for each gradient of sharded
            parameters.
        choose_left_out: returns the micro-batches to leave out, each with a similar one, from the
            actions of a stage and whether this step is recorded.
    """

    sees_modules = True

    def __init__(
        self, now: Callable[[], Position | None], note: Callable[[Event], None],
        choose_left_out: Callable[[Sequence[Action], bool], dict[int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.now, self.note, self.choose_left_out = now, note, choose_left_out
        self.runs: list[PipelineRun] = []
        self._open: PipelineRun | None = None
        self._tags: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._outer = callbacks.choose_left_out.set(self.leave_out)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        callbacks.choose_left_out.reset(self._outer)

    def accumulate_grad(self, params: Sequence[Any]) -> None:
        if any(p.axis is not None for p in params):
            self.note(Gradient(user_line()))

    def begin_action(self, action: Action) -> None:
        run, position = self._opened(), self.now()
        if position is not None:
            run.begins.append((action, position))
            run.nodes.append(next_number())
            self.note(Visit("forward" if action.kind == "F" else "backward", user_line()))

    def begin_run(self, order: Sequence[Any], schedule: pipeline.Schedule, stage: int) -> None:
        run = self._opened()
        run.grids, run.orders, run.stage = tuple(map(Grid.of, order)), schedule.orders, stage
        run.tags = {n: self._tags.get(n + 1, 0) for n in range(schedule.micro_batches)}

    def leave_out(self, actions: Sequence[Action]) -> dict[int, int]:
        """Implements ``callbacks.choose_left_out``."""
        run = self._opened()
        if self.choose_left_out is not None:
            run.left_out = self.choose_left_out(actions, self.now() is not None)
        return run.left_out

    def end_run(self) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        tags = current_runtime().tags
        used = {n: tags.get(n + 1, 0) - before for n, before in run.tags.items()}
        for number, other in run.left_out.items():
            tags[number + 1] = run.tags[number] + used[other]
        run.end = self.now()
        if run.end is not None:
            run.nodes.append(next_number())
            equal_transfers = len(set(used.values())) == 1
            run.has_equal_micro_batches = equal_transfers and run.makes_equal_nodes()

    def _opened(self) -> PipelineRun:
        if self._open is None:
            self._open, self._tags = PipelineRun(), dict(current_runtime().tags)
            if self.now() is not None:
                self.runs.append(self._open)
        return self._open


def cut_step(runs: Sequence[PipelineRun], last: Position) -> Iterator[ActionSlice]:
    """Yields the slices of a step that ends at ``last``: actions, and the parts between pipeline
    runs."""
    at = Position(0, 0, 0)
    for number, run in enumerate(runs):
        if not run.grids or run.end is None:  # forwards only
            continue
        yield ActionSlice(number, None, at, run.begins[0][1])
        ends = [*(position for _, position in run.begins[1:]), run.end]
        for (action, start), end in zip(run.begins, ends, strict=True):
            yield ActionSlice(number, action, start, end)
        at = run.end
    yield ActionSlice(len(runs), None, at, last)
