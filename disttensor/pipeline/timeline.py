"""Timelines of ranks: recorded in a real run, or computed from a schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from disttensor.checks import check_int, check_sequence, check_type
from disttensor.drawing.chrome_trace import TraceSpan, write_chrome_trace
from disttensor.drawing.svg import scale
from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule

KINDS = ("F", "B", "I", "W", "wait")
_FILL = {"F": "=", "B": "#", "I": "-", "W": "+"}
_COLUMNS = 72  # of the chart in text


class Event(NamedTuple):
    """A forward, a backward ("B", or "I" and "W"), or a wait for a peer inside one of them, on one
    rank; ``start`` and ``end`` in seconds. ``shape``: the order of visits of the schedule.

    A wait belongs to the forward or backward around it, of the same micro-batch and chunk.

    >>> event = pipeline.Event(1, 1, "F", micro_batch=3, chunk=0, start=0.25, end=0.75)
    >>> event.seconds, str(event.action)
    (0.5, 'F3')
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float
    shape: str = "loop"

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def action(self) -> Action:
        return Action(self.kind, self.micro_batch, self.chunk)


class TimelineSlice(NamedTuple):
    """A part of an event in which the rank computed, or a wait."""

    event: Event
    start: float
    end: float


@dataclass(frozen=True, init=False, repr=False)
class Timeline:
    """The events of one or more ranks, by one clock, in the order of their starts. ``+`` merges
    timelines.

    >>> F, B = pipeline.Event(0, 0, "F", 0, 0, 0, 1), pipeline.Event(0, 0, "B", 0, 0, 3, 4)
    >>> run = pipeline.Timeline([F]) + pipeline.Timeline([B])
    >>> run.span, run.busy(0), run.bubble, run
    (4, 2.0, 0.5, Timeline(1 rank, 2 events, 4 s, bubble 50.0 %))
    >>> print(pipeline.Timeline.of(pipeline.gpipe(2, 2)))
    rank 0 |F0======F1======........................B0##############B1##############|
    rank 1 |........F0======F1======B0##############B1##############................|
    0 to 9 ticks, bubble 33.3 %

    Raises ValueError for events of another kind and for events that end before they start.
    """

    events: tuple[Event, ...]
    unit: str

    def __init__(self, events: Iterable[Event], unit: str = "s") -> None:
        given = check_sequence("Timeline: events", events, "a list of events")
        for event in given:
            check_type("Timeline: events: entry", event, tuple, "an Event")
        check_type("Timeline: unit", unit, str, "a name, as 's',")
        ordered = tuple(sorted(map(Event._make, given), key=lambda e: (e.start, e.rank, e.end)))
        for event in ordered:
            if event.kind not in KINDS:
                raise ValueError(f"{event}: the kind is one of {', '.join(KINDS)}")
            if not -math.inf < event.start <= event.end < math.inf:
                raise ValueError(
                    f"{event}: start and end are times, and the end not before the start"
                )
        object.__setattr__(self, "events", ordered)
        object.__setattr__(self, "unit", unit)

    @classmethod
    def of(
        cls, schedule: Schedule, forward: float = 1, backward: float = 2,
        weights: float | None = None,
    ) -> Timeline:  # fmt: skip
        """Returns the timeline of a schedule on ideal stages: one rank per stage, in ticks."""
        check_type("Timeline.of: schedule", schedule, Schedule, "a Schedule")
        rows = enumerate(schedule.ticks(forward, backward, weights))
        return cls(
            [
                Event(stage, stage, *action, start, end, schedule.shape)
                for stage, row in rows
                for action, start, end in row
            ],
            unit="ticks",
        )

    @property
    def ranks(self) -> list[int]:
        return sorted(self._by_rank)

    @property
    def start(self) -> float:
        return self.events[0].start if self.events else 0.0

    @cached_property
    def span(self) -> float:
        """The time from the first start to the last end of all ranks."""
        return max(event.end for event in self.events) - self.start if self.events else 0.0

    def waits(self, rank: int) -> list[TimelineSlice]:
        check_int("Timeline: rank", rank)
        mine = self._by_rank.get(rank, [])
        return [TimelineSlice(e, e.start, e.end) for e in mine if e.kind == "wait"]

    def pieces(self, rank: int) -> list[TimelineSlice]:
        """Returns the forwards and backwards of ``rank`` without the waits inside, in order."""
        waits: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event, _, _ in self.waits(rank):
            waits[event.micro_batch, event.chunk].append(event)
        pieces = []
        for event in self._by_rank.get(rank, []):
            if event.kind == "wait":
                continue
            at = event.start
            for wait in waits[event.micro_batch, event.chunk]:
                if at < wait.start < event.end:
                    pieces.append(TimelineSlice(event, at, wait.start))
                if wait.start < event.end:
                    at = max(at, wait.end)
            if at < event.end:
                pieces.append(TimelineSlice(event, at, event.end))
        return sorted(pieces, key=lambda piece: piece.start)

    def busy(self, rank: int) -> float:
        """Returns the time in which ``rank`` computed; overlapping pieces count once."""
        total, at = 0.0, -math.inf
        for _, start, end in self.pieces(rank):
            total += max(end - max(start, at), 0)
            at = max(at, end)
        return total

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time, 0 to 1, in which they did not compute."""
        total = len(self.ranks) * self.span
        return 1 - sum(map(self.busy, self.ranks)) / total if total else 0.0

    def to_chrome_trace(self, path: str | PathLike[str]) -> Path:
        """Writes ``path`` for Perfetto and chrome://tracing: a process per rank, with a thread each
        for computing and waiting. A tick is a millisecond."""
        check_type("to_chrome_trace: path", path, (str, PathLike), "a path")
        processes = [
            (f"rank {rank}", rank, map(self._span, [*self.pieces(rank), *self.waits(rank)]))
            for rank in self.ranks
        ]
        return write_chrome_trace(
            path, processes, ("compute", "wait"), 1e6 if self.unit == "s" else 1e3
        )

    def _span(self, piece: TimelineSlice) -> TraceSpan:
        event, start, end = piece
        args = {"stage": event.stage, "chunk": event.chunk}
        thread, since = int(event.kind == "wait"), self.start
        return str(event.action), event.kind, thread, start - since, end - since, args

    @cached_property
    def _by_rank(self) -> dict[int, list[Event]]:
        rows: dict[int, list[Event]] = {}
        for event in self.events:
            rows.setdefault(event.rank, []).append(event)
        return rows

    def __add__(self, other: Timeline) -> Timeline:
        if not isinstance(other, Timeline):
            return NotImplemented
        if self.unit != other.unit:
            raise ValueError(
                f"a Timeline in {self.unit} and one in {other.unit} have no common clock"
            )
        return Timeline(self.events + other.events, self.unit)

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}"
        size, unit = scale(self.span, self.unit)
        return (
            f"Timeline({ranks}, {len(self.events)} events, {self.span / size:.4g} {unit}, "
            f"bubble {self.bubble:.1%})".replace("%", " %")
        )

    def __str__(self) -> str:
        """Returns a line per rank: forwards as F0==, backwards as B0## (in two parts as I0-- and
        W0++), dots where the rank is idle."""
        if not self.span:
            return repr(self)
        size, unit = scale(self.span, self.unit)
        lines = []
        for rank in self.ranks:
            line = ["."] * _COLUMNS
            for event, start, end in self.pieces(rank):
                left = round((start - self.start) / self.span * _COLUMNS)
                right = round((end - self.start) / self.span * _COLUMNS)
                texts = (str(event.action), f"{event.kind}{event.micro_batch}", event.kind)
                text = next((text for text in texts if len(text) <= right - left), "")
                line[left:right] = text.ljust(right - left, _FILL[event.kind])
            lines.append("".join(line))
        width = len(str(self.ranks[-1]))
        rows = zip(self.ranks, lines, strict=True)
        foot = f"0 to {self.span / size:.4g} {unit}, bubble {self.bubble:.1%}".replace("%", " %")
        return "\n".join([*(f"rank {rank:{width}} |{line}|" for rank, line in rows), foot])
