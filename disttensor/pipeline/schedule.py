"""A schedule: for each stage of a pipeline, the order of its forwards and backwards, as a value.

A stage may be visited several times (chunks): the program then goes through *virtual* stages 0, 1,
2, ... and its backward through the same stages in reverse. Virtual stage v is visit ``v // stages``
of stage ``v % stages`` (shape "loop"), or stages are visited to and fro (shape "v": 0, 1, 2, 2, 1,
0). ``F(v, m)`` needs ``F(v - 1, m)``; ``B(v, m)`` and ``I(v, m)`` need ``F(v, m)`` and the
B or I of v + 1; ``W(v, m)`` needs ``I(v, m)``. Sends never block.

The examples of this package run after ``from disttensor import pipeline``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from disttensor.checks import check_int, check_number, check_sequence
from disttensor.core.mesh import ProcessMesh
from disttensor.pipeline.action import Action, read, wrong_in

SHAPES = ("loop", "v")


class Tick(NamedTuple):
    """The time of an action, if all stages take the same time and transfers take none.

    >>> pipeline.gpipe(1, 1).ticks()[0][1]
    Tick(action=Action(kind='B', micro_batch=0, chunk=0), start=1, end=3)
    """

    action: Action
    start: float
    end: float


def virtual(shape: str, stages: int, stage: int, chunk: int) -> int:
    """Returns the virtual stage of the visit ``chunk`` of ``stage``, for a shape and a number of
    stages."""
    return chunk * stages + (stages - 1 - stage if shape == "v" and chunk % 2 else stage)


def route(shape: str, meshes: Sequence[ProcessMesh], chunks: int) -> list[ProcessMesh]:
    """Returns the meshes of the stages in the order of their visits."""
    visits = [meshes[:: -1 if shape == "v" and chunk % 2 else 1] for chunk in range(chunks)]
    return list(chain.from_iterable(visits))


@dataclass(frozen=True, repr=False)
class Schedule:
    """``orders[s]``: the actions of stage s in order, as text or as Actions. Frozen, hashable.
    ``shape``: the order of several visits of the stages, "loop" (0, 1, 0, 1) or "v" (0, 1, 1,
    0).

    >>> mine = pipeline.Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    >>> mine.check()
    >>> mine == pipeline.one_f_one_b(2, 2), mine.stages, mine.micro_batches, mine.peak(0)
    (True, 2, 2, 2)

    Raises ValueError for an invalid action; ``check`` finds errors in the order.
    """

    orders: tuple[tuple[Action, ...], ...]
    shape: str

    def __init__(self, orders: Iterable[str | Iterable[Action | str]], shape: str = "loop") -> None:
        if shape not in SHAPES:
            raise ValueError(f"Schedule: shape={shape!r}: 'loop' or 'v' is expected")
        if isinstance(orders, str):
            raise ValueError(f"Schedule: one order per stage, a list of them: [{orders!r}, ...]")
        given = check_sequence("Schedule: orders", orders, "a list of an order for each stage")
        rows = tuple(tuple(read(order, stage)) for stage, order in enumerate(given))
        if not any(rows):
            raise ValueError("Schedule: no stage has an action, as in Schedule(['F0 B0'])")
        object.__setattr__(self, "orders", rows)
        object.__setattr__(self, "shape", shape)

    @property
    def stages(self) -> int:
        return len(self.orders)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(a.micro_batch for order in self.orders for a in order)

    @cached_property
    def chunks(self) -> int:
        """Returns the number of visits of each stage."""
        return 1 + max(a.chunk for order in self.orders for a in order)

    def peak(self, stage: int) -> int:
        """Returns the most micro-batches (times chunks) whose activations ``stage`` holds: from
        their F to the end of their backward, B or W."""
        check_int("peak: stage", stage)
        if not 0 <= stage < self.stages:
            raise ValueError(
                f"peak: no stage {stage}; this schedule has stages 0..{self.stages - 1}"
            )
        live = most = 0
        for action in self.orders[stage]:
            live += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, live)
        return most

    def check(self) -> None:
        """Raises ValueError for a missing, repeated or too early action, and for a deadlock."""
        counts = self.micro_batches, self.chunks
        wrong = [
            f"stage {stage} {line}"
            for stage, order in enumerate(self.orders)
            for line in wrong_in(order, *counts)
        ]
        if not wrong:
            wrong = self.simulated(lambda stage, action: 1.0)[1]
            if wrong:
                wrong = ["it never ends; each of these stages waits for another:", *wrong]
        if wrong:
            sizes = (
                f"{self.stages} stages, {self.micro_batches} micro-batches, {self.chunks} chunks"
            )
            raise ValueError("\n  ".join([f"Schedule of {sizes} cannot be carried out:", *wrong]))

    def ticks(
        self, forward: float = 1, backward: float = 2, weights: float | None = None
    ) -> list[list[Tick]]:
        """Returns the actions of each stage with start and end, for the costs of F and B.
        ``weights``: the part of ``backward`` that is W (default: half of it); the rest is I."""
        costs = self._costs(forward, backward, weights)
        return self.simulated(lambda stage, action: costs[action.kind])[0]

    def bubble(
        self, forward: float = 1, backward: float = 2, weights: float | None = None
    ) -> float:
        """Returns the idle fraction of all stages: (p - 1) / (m + p - 1) for "gpipe" and "1f1b".

        >>> pipeline.gpipe(4, 1).bubble(), pipeline.one_f_one_b(2, 3).bubble()
        (0.75, 0.25)
        """
        ticks = self.ticks(forward, backward, weights)
        span = max(tick.end for row in ticks for tick in row)
        busy = self.micro_batches * self.chunks * (forward + backward)  # of each stage
        return 1 - busy / span

    def _costs(self, forward: float, backward: float, weights: float | None) -> dict[str, float]:
        check_number("ticks: forward", forward)
        check_number("ticks: backward", backward)
        part = backward / 2 if weights is None else weights
        check_number("ticks: weights", part)
        if not (forward >= 0 and 0 <= part <= backward and 0 < forward + backward < float("inf")):
            raise ValueError(
                f"ticks: {forward=}, {backward=} and {weights=} are no durations; one must be > 0, "
                "and weights are a part of backward"
            )
        self.check()
        return {"F": forward, "B": backward, "I": backward - part, "W": part}

    def __repr__(self) -> str:
        lines = [repr(" ".join(map(str, order))) for order in self.orders]
        shape = "" if self.shape == "loop" else f", shape={self.shape!r}"
        if sum(map(len, lines)) < 80:
            return f"Schedule([{', '.join(lines)}]{shape})"
        return "Schedule([\n" + "".join(f"    {line},\n" for line in lines) + f"]{shape})"

    def virtual(self, stage: int, chunk: int) -> int:
        """Returns the virtual stage of the visit ``chunk`` of ``stage``."""
        return virtual(self.shape, self.stages, stage, chunk)

    def needs(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Returns (stage, F or B) of another virtual stage that must end before, if any. A B is
        also an I."""
        if action.kind == "W":
            return None
        forward = action.kind == "F"
        virtual = self.virtual(stage, action.chunk) + (-1 if forward else 1)
        if not 0 <= virtual < self.stages * self.chunks:
            return None
        chunk, place = divmod(virtual, self.stages)
        there = self.virtual(place, chunk) % self.stages
        return there, Action("F" if forward else "B", action.micro_batch, chunk)

    def simulated(
        self, cost: Callable[[int, Action], float], transfer: float = 0.0
    ) -> tuple[list[list[Tick]], list[str]]:
        """Returns the ticks until no stage can continue, and a line of text for each stage that has
        not ended. ``cost``: of an action on a stage; ``transfer``: from one stage to another.

        Each stage starts its next action as soon as it can, so the times do not depend on the order
        of the loop. The order of each stage must be valid on its own (``wrong_in``).
        """
        ticks: list[list[Tick]] = [[] for _ in self.orders]
        clock = StageClock(self, transfer)
        ready = deque(range(self.stages))
        while ready:
            stage = ready.popleft()
            order, row = self.orders[stage], ticks[stage]
            before = len(row)
            while len(row) < len(order):
                action = order[len(row)]
                start = clock.earliest(stage, action)
                if start is None:
                    break
                row.append(Tick(action, start, clock.run(stage, action, cost(stage, action))))
            if len(row) > before:  # the neighbouring virtual stages may go on
                ready += {(stage - 1) % self.stages, (stage + 1) % self.stages}
        stuck = []
        for stage, (order, row) in enumerate(zip(self.orders, ticks, strict=True)):
            if len(row) < len(order):
                action = order[len(row)]
                there, what = self.needs(stage, action) or (stage, action)
                split = what._replace(kind="I")
                if what.kind == "B" and split in self.orders[there]:
                    what = split
                stuck.append(
                    f"stage {stage} at {action} (its action {len(row)}): waits for {what} of stage "
                    f"{there}"
                )
        return ticks, stuck


class StageClock:
    """The time of each stage of a schedule while it is simulated or searched: what may run, and
    when. ``free``: the end of the last action of each stage."""

    def __init__(self, schedule: Schedule, transfer: float) -> None:
        self.free: list[float] = [0] * schedule.stages
        self._schedule, self._transfer = schedule, transfer
        self._needs: dict[tuple[int, str, int], Any] = {}
        self._ends: dict[tuple[int, str, int, int], float] = {}  # stage, F or B, chunk, micro-batch

    def earliest(self, stage: int, action: Action) -> float | None:
        """Returns when an action could start; None if what it needs has not run."""
        kind, micro_batch, chunk = action
        key = stage, kind, chunk
        if key not in self._needs:
            self._needs[key] = self._schedule.needs(stage, action)
        arrival: float = 0
        if self._needs[key] is not None:
            there, (before, _, visit) = self._needs[key]
            end = self._ends.get((there, before, visit, micro_batch))
            if end is None:
                return None
            arrival = end + self._transfer * (there != stage)
        return max(arrival, self.free[stage])

    def run(self, stage: int, action: Action, cost: float) -> float:
        """Runs an action as soon as it can start; returns when it ends."""
        start = self.earliest(stage, action)
        assert start is not None
        kind, micro_batch, chunk = action
        end = self.free[stage] = start + cost
        if kind != "W":  # B or I makes the gradient that is sent on
            self._ends[stage, "F" if kind == "F" else "B", chunk, micro_batch] = end
        return end
