"""Collectives and messages under way, and the clock by which they and kernels end.

A collective starts when all of its ranks have reached it, a message when it is posted. Each starts
after the earlier transfers of its *lane*: the collectives of a process group as one kind of rank
takes part in it, or the messages from one kind to another.

If ranks share devices, ranks that compute slow each other down. All of them progress equally fast,
so one clock is enough. It counts seconds of *work*: a kernel of one second takes one second of
work. Work passes as fast as *time* while each rank that computes has a device of its own, and
slower otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from disttensor.simulate.devices import Network
from disttensor.simulate.events import Collective, Event, Message


class Span(NamedTuple):
    """An interval of a time line, in seconds of the step. ``lane``: "compute", "communication"
    (concurrent with the compute), "wait for ranks" or "wait for a stage"."""

    lane: str
    name: str
    phase: str
    where: str
    start: float
    end: float


@dataclass
class RankRow:
    """The time line of one kind of rank. ``times``: for each event, when it ends, in seconds."""

    spans: list[Span] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: float = 0.0

    def total(self, lane: str) -> float:
        return sum(s.end - s.start for s in self.spans if s.lane == lane)


class Clock:
    """Runs callbacks in the order of time.

    Args:
        sharing: the number of ranks that share a device.
        world: the number of ranks.
    """

    def __init__(self, sharing: float, world: int) -> None:
        self.share = sharing / world
        self.busy = 0.0  # ranks that use their device
        self.now = 0.0  # in seconds of work
        self._rates = [(0.0, 0.0, 1.0)]  # (work, time, work per second) from here on
        self._by_work: list[Any] = []  # heap of (work, number, callback)
        self._by_time: list[Any] = []
        self._number = count()

    def add_busy(self, ranks: float) -> None:
        """Changes the number of ranks that use their device from now on."""
        self.busy += ranks
        rate = 1.0 / max(1.0, self.share * self.busy)
        if rate != self._rates[-1][2]:
            self._rates.append((self.now, self._time(self.now), rate))

    def call_at_work(self, work: float, callback: Callable[[], None]) -> None:
        """Schedules a callback for when ``work`` is done, in seconds of work since the start."""
        heappush(self._by_work, (work, next(self._number), callback))

    def call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Schedules a callback in a number of seconds from now."""
        heappush(self._by_time, (self._time(self.now) + seconds, next(self._number), callback))

    def run(self) -> None:
        """Runs all callbacks, also those that are scheduled meanwhile."""
        by_work, by_time = self._by_work, self._by_time
        while by_work or by_time:
            if by_work and (not by_time or self._time(by_work[0][0]) <= by_time[0][0]):
                self.now, _, callback = heappop(by_work)
            else:
                at, _, callback = heappop(by_time)
                begin, since, rate = self._rates[-1]
                self.now = max(self.now, begin + (at - since) * rate)
            callback()

    def _time(self, work: float) -> float:
        """Returns when ``work``, which is not in the past, is done at the present rate."""
        begin, at, rate = self._rates[-1]
        return at + (work - begin) / rate

    def times(self, works: Iterable[float]) -> list[float]:
        """Returns for each amount of work when it was done."""
        begins = [begin for begin, _, _ in self._rates]
        out = []
        for work in works:
            begin, at, rate = self._rates[bisect_right(begins, work) - 1]
            out.append(at + (work - begin) / rate)
        return out


@dataclass
class Party:
    """A kind of rank: the rank that was recorded, the number of its ranks, its events, the times of
    its host and its device, and its time line."""

    rank: int
    ranks: int
    events: Sequence[Event]
    host: float = 0.0
    device: float = 0.0
    row: RankRow = field(default_factory=RankRow)

    @property
    def now(self) -> float:
        return max(self.device, self.host)


class PendingTransfer(NamedTuple):
    """The transfer that a Wait names, and the lane of the span of waiting."""

    key: Any
    lane: str
    e: Collective | Message


@dataclass
class _Transfer:
    """A collective, as kind number ``kind`` takes part in it, or a message that this kind sends.
    ``needs``: the collectives of other kinds to be reached first; ``parts``: of the two parts, on
    the wire and on the processor, the number that has not ended."""

    key: Any
    e: Collective | Message
    kind: int
    needs: list[Any]
    start: float = 0.0
    parts: int = 0


class Transfers:
    """The transfers of all kinds.

    Args:
        parties: the kinds.
        kind_of: the number of the kind of each rank.
        network: the costs of transfers.
        clock: schedules the ends of transfers.
        resume: is called with a kind when the transfer that it waits for has arrived.
    """

    def __init__(
        self, parties: Sequence[Party], kind_of: Mapping[int, int], network: Network, clock: Clock,
        resume: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.parties, self.kind_of, self.network = parties, kind_of, network
        self.clock, self.resume = clock, resume
        self._reached: set[Any] = set()  # (kind, lane, number) of collectives
        self._dependents: dict[Any, list[Any]] = defaultdict(list)  # the lanes that need one
        self._lanes: dict[Any, deque[_Transfer]] = defaultdict(deque)
        self._groups: dict[Any, dict[str, int]] = defaultdict(dict)
        self._seen: Counter[Any] = Counter()  # collectives in each lane
        self._arrived: Counter[Any] = Counter()  # number of transfers that ended, by key
        self._expected: Counter[Any] = Counter()  # number of transfers of a key
        self._waiting: dict[Any, int] = {}  # a key -> the kind that waits for it

    def expect(self, k: int) -> None:
        """Counts the messages that kind number ``k`` will send: of several messages with one key a
        receiver waits for the last."""
        for e in self.parties[k].events:
            if isinstance(e, Message) and e.sends and e.peer in self.kind_of:
                self._expected[k, self.kind_of[e.peer], e.tag, e.number] += 1

    def post(self, k: int, e: Collective | Message) -> PendingTransfer | None:
        """Starts a transfer of kind number ``k``, or adds it to its lane.

        Returns:
            The transfer to wait for; None for a message that is sent.
        """
        return self._collective(k, e) if isinstance(e, Collective) else self._message(k, e)

    def wait(self, k: int, pending: PendingTransfer) -> bool:
        """Returns True if the transfer has arrived; else ``resume(k)`` is called at its arrival."""
        if self._arrived[pending.key] >= self._expected[pending.key]:
            return True
        self._waiting[pending.key] = k
        return False

    def _collective(self, k: int, e: Collective) -> PendingTransfer:
        """Groups of one axis are identified by their order: kinds are in different groups."""
        alike = self._groups[k, e.axis, len(e.ranks)]
        lane = e.axis, len(e.ranks), alike.setdefault(e.group, len(alike))
        number = self._seen[k, lane]
        self._seen[k, lane] += 1
        others = {self.kind_of[r] for r in e.ranks if r in self.kind_of} | {k}
        key = k, lane, number
        self._expected[key] = 1
        self._reached.add(key)
        needs = [(o, lane, number) for o in others]
        self._lanes[k, lane].append(_Transfer(key, e, k, needs))
        for need in needs:
            self._dependents[need].append((k, lane))
        for dependent in self._dependents[key]:
            self._start(dependent)
        return PendingTransfer(key, "wait for ranks", e)

    def _message(self, k: int, e: Message) -> PendingTransfer | None:
        peer = self.kind_of.get(e.peer)
        if not e.sends:
            return PendingTransfer((peer, k, e.tag, e.number), "wait for a stage", e)
        if peer is not None:
            self._lanes[k, peer].append(_Transfer((k, peer, e.tag, e.number), e, k, []))
            self._start((k, peer))
        return None

    def _start(self, lane: Any) -> None:
        """Starts the first transfer of a lane, unless it runs or a rank has not reached it. It
        takes time on the wire, and concurrently work of a processor."""
        queue = self._lanes[lane]
        if not queue or queue[0].parts or not self._reached.issuperset(queue[0].needs):
            return
        one, network, e = queue[0], self.network, queue[0].e
        sender = self.parties[one.kind]
        if isinstance(e, Collective):
            seconds = network.collective(e.kind, e.nbytes, e.ranks)
        else:
            seconds = network.message(e.nbytes, sender.rank, e.peer)
        work = network.work(e.nbytes)
        one.start, one.parts = self.clock.now, 2 if work else 1
        self.clock.call_after(seconds, lambda: self._end_part(lane, 0))
        if work:
            self.clock.add_busy(sender.ranks)
            until = self.clock.now + work
            self.clock.call_at_work(until, lambda: self._end_part(lane, sender.ranks))

    def _end_part(self, lane: Any, ranks: int) -> None:
        self.clock.add_busy(-ranks)
        one = self._lanes[lane][0]
        one.parts -= 1
        if one.parts:
            return
        self._lanes[lane].popleft()
        e, now = one.e, self.clock.now
        name = f"{e.kind} over {e.axis}" if isinstance(e, Collective) else "send"
        row = self.parties[one.kind].row
        row.spans.append(Span("communication", name, e.phase, e.where, one.start, now))
        self._arrived[one.key] += 1
        self._start(lane)
        k = self._waiting.get(one.key)
        if k is not None and self._arrived[one.key] >= self._expected[one.key]:
            del self._waiting[one.key]
            self.resume(k)
