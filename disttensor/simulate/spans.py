"""What a time line consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """What ran from ``start`` to ``end``, in seconds of the step. ``lane``: "compute",
    "communication" (beside the compute), "wait for ranks" or "wait for a stage"."""

    lane: str
    name: str
    phase: str
    where: str
    start: float
    end: float


@dataclass
class Row:
    """The time line of one kind of rank. ``times``: when it is done with each event, in seconds."""

    spans: list[Span] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: float = 0.0

    def total(self, lane: str) -> float:
        return sum(s.end - s.start for s in self.spans if s.lane == lane)
