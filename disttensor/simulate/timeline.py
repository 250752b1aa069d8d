"""When each rank does what: the recorded events of all kinds, run against a device and a network.

A rank has a clock of its host and one of its device. A collective starts when all of its ranks have
come to it and runs beside what follows, until somebody waits for it. A message arrives when it has
been sent, and travels after those before it. Every kind is one rank here: what ranks of other kinds
do is taken from theirs.

Where ranks share devices those that compute slow each other down, and so do transfers that a
processor carries out. So what happens is gone through in the order of time, and all clocks are in
seconds of work (``shared_clock``) until the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from disttensor.simulate.devices import Device
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.events import Collective, Event, Message, Op, Wait
from disttensor.simulate.network import Network
from disttensor.simulate.shared_clock import SharedClock


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
    ranks: int
    events: Sequence[Event]
    at: int = 0
    host: float = 0.0
    device: float = 0.0
    row: Row = field(default_factory=Row)
    works: dict[int, Any] = field(default_factory=dict)  # what a Wait names
    seen: Counter[Any] = field(default_factory=Counter)
    groups: dict[Any, dict[str, int]] = field(default_factory=dict)


class _Awaited(NamedTuple):
    """What a Wait is for, and the lane of its span."""

    key: Any
    lane: str
    e: Collective | Message


@dataclass
class _Transfer:
    """A collective, as one ``kind`` takes part in it, or a message that it sends. ``needs``: what
    has to be posted first; ``parts``: those on the wire and on the processor that are not over."""

    key: Any
    e: Collective | Message
    kind: int
    needs: list[Any]
    start: float = 0.0
    parts: int = 0


def timelines(
    kinds: Sequence[tuple[Sequence[int], int, Sequence[Event]]],
    world: int,
    device: Device,
    network: Network,
) -> list[Row]:
    """Of each kind (its ranks, the one that was recorded, its events) of a world the time line."""
    return _Simulation(kinds, world, device, network).run()


class _Simulation:
    def __init__(self, kinds: Any, world: int, device: Device, network: Network) -> None:
        self.device, self.network = device, network
        self.kind_of = {r: k for k, (ranks, _, _) in enumerate(kinds) for r in ranks}
        self.ranks = [_Rank(rank, len(ranks), events) for ranks, rank, events in kinds]
        self.clock = SharedClock(device.sharing, world)
        self.by_work: list[Any] = []  # (work, number, what is done then)
        self.by_time: list[Any] = []
        self.number = count()
        self.posted: set[Any] = set()  # (kind, lane, number) of collectives that it has come to
        self.followers: dict[Any, list[Any]] = defaultdict(list)  # lanes with one that needs it
        self.lanes: dict[Any, deque[_Transfer]] = defaultdict(deque)
        self.arrived: Counter[Any] = Counter()  # transfers that are over, by their keys
        self.promised = self._promised()
        self.waiting: dict[Any, int] = {}  # what is waited for -> by which kind

    def _promised(self) -> Counter[Any]:
        """How many transfers make what a Wait is for: a collective is one, and of messages with one
        key a receiver waits for the last."""
        out: Counter[Any] = Counter()
        for k, one in enumerate(self.ranks):
            for e in one.events:
                if isinstance(e, Message) and e.sends and e.peer in self.kind_of:
                    out[k, self.kind_of[e.peer], e.tag, e.number] += 1
        return out

    def run(self) -> list[Row]:
        clock = self.clock
        for k, one in enumerate(self.ranks):
            clock.add(one.ranks)
            self._computes(k)
        while self.by_work or self.by_time:
            first = self.by_work and (
                not self.by_time or clock.time(self.by_work[0][0]) <= self.by_time[0][0]
            )
            if first:
                clock.now, _, do = heappop(self.by_work)
            else:
                at, _, do = heappop(self.by_time)
                clock.now = clock.work(at)
            do()
        for one in self.ranks:
            if one.at < len(one.events):
                raise SimulationError(
                    f"rank {one.rank} waits for ever, at event {one.at} of {len(one.events)}: what "
                    "it waits for is started by no other kind of rank. Ranks of different kinds do "
                    "not run the same program"
                )
            self._tell_time(one)
        return [one.row for one in self.ranks]

    def _tell_time(self, one: _Rank) -> None:
        """All that was noted in seconds of work becomes seconds of the step."""
        row, times = one.row, self.clock.times
        starts, ends = times([s.start for s in row.spans]), times([s.end for s in row.spans])
        row.spans = [
            s._replace(start=a, end=b) for s, a, b in zip(row.spans, starts, ends, strict=True)
        ]
        row.times = times(row.times)
        (row.end,) = times([self._now(one)])

    # Ranks ----------------------------------------------------------------------------------------

    def _computes(self, k: int) -> None:
        """All until it communicates, or ends."""
        one, device = self.ranks[k], self.device
        while one.at < len(one.events):
            op = one.events[one.at]
            if not isinstance(op, Op):
                break
            one.host += device.launch
            if not device.asynchronous:
                one.device = max(one.device, one.host)
            start = max(one.device, one.host)
            one.device = start + device.seconds(op.flops, op.nbytes, op.dtype)
            if not device.asynchronous:
                one.host = one.device
            one.row.spans.append(Span("compute", op.name, op.phase, op.where, start, one.device))
            self._goes_on(one)
        self._at(self.by_work, self._now(one), lambda: self._communicates(k))

    def _at(self, heap: list[Any], when: float, do: Callable[[], None]) -> None:
        heappush(heap, (when, next(self.number), do))

    def _goes_on(self, one: _Rank) -> None:
        one.at += 1
        one.row.times.append(self._now(one))

    def _now(self, one: _Rank) -> float:
        return max(one.device, one.host)

    def _communicates(self, k: int) -> None:
        one = self.ranks[k]
        if one.at == len(one.events):
            self.clock.add(-one.ranks)
            return
        event = one.events[one.at]
        if isinstance(event, Collective):
            self._post(k, one, event)
        elif isinstance(event, Message):
            self._message(k, one, event)
        elif isinstance(event, Wait) and not self._is_there(k, one, event):
            return
        self._goes_on(one)
        self._computes(k)

    def _is_there(self, k: int, one: _Rank, wait: Wait) -> bool:
        """Has it come? If not, the rank stays here until then."""
        awaited = one.works.get(wait.work)  # None: it was started before the step
        if awaited is None or self.arrived[awaited.key] >= self.promised[awaited.key]:
            one.works.pop(wait.work, None)
            return True
        self.waiting[awaited.key] = k
        self.clock.add(-one.ranks)
        return False

    def _resume(self, k: int, awaited: _Awaited) -> None:
        one, now, e = self.ranks[k], self.clock.now, awaited.e
        self.clock.add(one.ranks)
        name = e.kind if isinstance(e, Collective) else "receive"
        one.row.spans.append(Span(awaited.lane, name, e.phase, e.where, self._now(one), now))
        one.device = now
        if not self.device.asynchronous:
            one.host = now
        self._communicates(k)

    # Transfers ------------------------------------------------------------------------------------

    def _post(self, k: int, one: _Rank, e: Collective) -> None:
        """Groups of one axis are known by their order: another kind is in another one of them."""
        alike = one.groups.setdefault((e.axis, len(e.ranks)), {})
        lane = e.axis, len(e.ranks), alike.setdefault(e.group, len(alike))
        number = one.seen[lane]
        one.seen[lane] += 1
        others = {self.kind_of[r] for r in e.ranks if r in self.kind_of} | {k}
        key = k, lane, number
        self.promised[key] = 1
        self.posted.add(key)
        one.works[e.work] = _Awaited(key, "wait for ranks", e)
        needs = [(o, lane, number) for o in others]
        self.lanes[k, lane].append(_Transfer(key, e, k, needs))
        for need in needs:
            self.followers[need].append((k, lane))
        for follower in self.followers[key]:
            self._start(follower)

    def _message(self, k: int, one: _Rank, e: Message) -> None:
        peer = self.kind_of.get(e.peer)
        if not e.sends:
            one.works[e.work] = _Awaited((peer, k, e.tag, e.number), "wait for a stage", e)
        elif peer is not None:
            self.lanes[k, peer].append(_Transfer((k, peer, e.tag, e.number), e, k, []))
            self._start((k, peer))

    def _start(self, lane: Any) -> None:
        """The first of a lane, if it does not run and all have come to it. On the wire it takes its
        time, and beside that a processor its work."""
        queue = self.lanes[lane]
        if not queue or queue[0].parts or not self.posted.issuperset(queue[0].needs):
            return
        one, network, e = queue[0], self.network, queue[0].e
        sender = self.ranks[one.kind]
        if isinstance(e, Collective):
            seconds = network.collective(e.kind, e.nbytes, e.ranks)
        else:
            seconds = network.message(e.nbytes, sender.rank, e.peer)
        work = network.work(e.nbytes)
        one.start, one.parts = self.clock.now, 2 if work else 1
        at = self.clock.time(self.clock.now) + seconds
        self._at(self.by_time, at, lambda: self._part_ends(lane, 0))
        if work:
            self.clock.add(sender.ranks)
            until = self.clock.now + work
            self._at(self.by_work, until, lambda: self._part_ends(lane, sender.ranks))

    def _part_ends(self, lane: Any, ranks: int) -> None:
        self.clock.add(-ranks)
        one = self.lanes[lane][0]
        one.parts -= 1
        if one.parts:
            return
        self.lanes[lane].popleft()
        e, now = one.e, self.clock.now
        name = f"{e.kind} over {e.axis}" if isinstance(e, Collective) else "send"
        row = self.ranks[one.kind].row
        row.spans.append(Span("communication", name, e.phase, e.where, one.start, now))
        self.arrived[one.key] += 1
        self._start(lane)
        k = self.waiting.get(one.key)
        if k is not None and self.arrived[one.key] >= self.promised[one.key]:
            del self.waiting[one.key]
            rank = self.ranks[k]
            wait = rank.events[rank.at]
            assert isinstance(wait, Wait)
            self._resume(k, rank.works[wait.work])
