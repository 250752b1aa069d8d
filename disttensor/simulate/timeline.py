"""When each rank does what: the recorded events of all kinds, run against a device and a network.

A rank has a clock of its host and one of its device. A collective starts when all of its ranks have
come to it and runs beside what follows, until somebody waits for it. A message arrives when it has
been sent, and travels after those before it. Every kind is one rank here: what ranks of other kinds
do is taken from theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disttensor.simulate.devices import Device
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.events import Collective, Event, Message, Op, Wait
from disttensor.simulate.network import Network


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


@dataclass
class _Rank:
    """One kind, on its way through its events."""

    rank: int
    events: Sequence[Event]
    at: int = 0
    host: float = 0.0
    device: float = 0.0
    row: Row = field(default_factory=Row)
    works: dict[int, Any] = field(default_factory=dict)  # what a Wait names
    seen: Counter[Any] = field(default_factory=Counter)
    groups: dict[Any, dict[str, int]] = field(default_factory=dict)


def timelines(
    kinds: Sequence[tuple[Sequence[int], int, Sequence[Event]]], device: Device, network: Network
) -> list[Row]:
    """Of each kind (its ranks, the one that was recorded, its events) the time line."""
    return _Simulation(kinds, device, network).run()


class _Simulation:
    def __init__(self, kinds: Any, device: Device, network: Network) -> None:
        self.device, self.network = device, network
        self.kind_of = {r: k for k, (ranks, _, _) in enumerate(kinds) for r in ranks}
        self.ranks = [_Rank(rank, events) for _, rank, events in kinds]
        self.posted: dict[Any, float] = {}  # (kind, collective) -> when its ranks came to it
        self.ended: dict[Any, float] = {}  # of collectives, per kind; of lanes
        self.sent: dict[Any, list[float]] = defaultdict(list)  # arrivals
        self.promised = self._promised()

    def _promised(self) -> Counter[Any]:
        """How many messages of each key will be sent, so that a receiver waits for the last."""
        out: Counter[Any] = Counter()
        for k, one in enumerate(self.ranks):
            for e in one.events:
                if isinstance(e, Message) and e.sends and e.peer in self.kind_of:
                    out[k, self.kind_of[e.peer], e.tag, e.number] += 1
        return out

    def run(self) -> list[Row]:
        moved = True
        while moved:
            moved = False
            for k, one in enumerate(self.ranks):
                before = one.at
                while one.at < len(one.events) and self._step(k, one, one.events[one.at]):
                    one.at += 1
                    one.row.times.append(self._now(one))
                moved = moved or one.at != before
        for one in self.ranks:
            if one.at < len(one.events):
                raise SimulationError(
                    f"rank {one.rank} waits for ever, at event {one.at} of {len(one.events)}: what "
                    "it waits for is started by no other kind of rank. Ranks of different kinds do "
                    "not run the same program"
                )
            one.row.end = max(one.host, one.device)
        return [one.row for one in self.ranks]

    def _step(self, k: int, one: _Rank, event: Event) -> bool:
        """Take an event; False where the rank has to wait until others go on."""
        if isinstance(event, Op):
            self._compute(one, event)
        elif isinstance(event, Collective):
            self._post(k, one, event)
        elif isinstance(event, Message):
            self._message(k, one, event)
        else:
            return self._wait(k, one, event)
        return True

    def _compute(self, one: _Rank, op: Op) -> None:
        one.host += self.device.launch
        if not self.device.asynchronous:
            one.device = max(one.device, one.host)
        start = max(one.device, one.host)
        one.device = start + self.device.seconds(op.flops, op.nbytes, op.dtype)
        if not self.device.asynchronous:
            one.host = one.device
        one.row.spans.append(Span("compute", op.name, op.phase, op.where, start, one.device))

    def _now(self, one: _Rank) -> float:
        return max(one.device, one.host)

    def _post(self, k: int, one: _Rank, e: Collective) -> None:
        """Groups of one axis are known by their order: another kind is in another one of them."""
        alike = one.groups.setdefault((e.axis, len(e.ranks)), {})
        lane = e.axis, len(e.ranks), alike.setdefault(e.group, len(alike))
        number = one.seen[lane]
        one.seen[lane] += 1
        others = {self.kind_of[r] for r in e.ranks if r in self.kind_of} | {k}
        self.posted[k, lane, number] = self._now(one)
        one.works[e.work] = (e, lane, number, others)

    def _message(self, k: int, one: _Rank, e: Message) -> None:
        if not e.sends:
            one.works[e.work] = (e,)
            return
        peer = self.kind_of.get(e.peer)
        if peer is None:
            return
        way = k, peer
        start = max(self._now(one), self.ended.get(way, 0.0))
        end = start + self.network.message(e.nbytes, one.rank, e.peer)
        self.ended[way] = end
        self.sent[k, peer, e.tag, e.number].append(end)
        one.row.spans.append(Span("communication", "send", e.phase, e.where, start, end))

    def _wait(self, k: int, one: _Rank, wait: Wait) -> bool:
        work = one.works.get(wait.work)
        if work is None:  # it was started before the step
            return True
        now = self._now(one)
        end: float | None
        if isinstance(work[0], Message):
            end, lane = self._arrival(k, work[0]), "wait for a stage"
        else:
            end, lane = self._end(k, one, *work), "wait for ranks"
        if end is None:
            return False
        del one.works[wait.work]
        if end > now:
            e = work[0]
            name = e.kind if isinstance(e, Collective) else "receive"
            one.row.spans.append(Span(lane, name, e.phase, e.where, now, end))
            one.device = end
            if not self.device.asynchronous:
                one.host = end
        return True

    def _arrival(self, k: int, e: Message) -> float | None:
        source = self.kind_of.get(e.peer)
        if source is None:
            return 0.0
        key = source, k, e.tag, e.number
        if len(self.sent[key]) < self.promised[key]:
            return None
        return max(self.sent[key], default=0.0)

    def _end(
        self, k: int, one: _Rank, e: Collective, lane: Any, number: int, others: set[int]
    ) -> float | None:
        if (k, lane, number) in self.ended:
            return self.ended[k, lane, number]
        posts = [self.posted.get((other, lane, number)) for other in others]
        if any(p is None for p in posts):
            return None
        start = max([*(p for p in posts if p is not None), self.ended.get((k, lane), 0.0)])
        end = start + self.network.collective(e.kind, e.nbytes, e.ranks)
        self.ended[k, lane, number] = self.ended[k, lane] = end
        name = f"{e.kind} over {e.axis}"
        one.row.spans.append(Span("communication", name, e.phase, e.where, start, end))
        return end
