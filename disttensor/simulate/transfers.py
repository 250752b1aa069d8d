"""Collectives and messages on their way.

A collective starts when all of its ranks have come to it, a message when it is posted; both travel
after those before them in their *lane*: of collectives a process group as one kind of rank takes
part in it, of messages the way from one kind to another.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from disttensor.simulate.agenda import Agenda
from disttensor.simulate.events import Collective, Event, Message
from disttensor.simulate.network import Network
from disttensor.simulate.spans import Row, Span


class Party(NamedTuple):
    """A kind that takes part: the rank that was recorded, how many do the same, its time line."""

    rank: int
    ranks: int
    row: Row


class Awaited(NamedTuple):
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


class Transfers:
    """Those of all kinds. ``resume(kind)``: what it waits for has come."""

    def __init__(
        self, parties: Sequence[Party], kind_of: Mapping[int, int], network: Network,
        agenda: Agenda, resume: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.parties, self.kind_of, self.network = parties, kind_of, network
        self.agenda, self.clock, self.resume = agenda, agenda.clock, resume
        self._posted: set[Any] = set()  # (kind, lane, number) of collectives that it has come to
        self._followers: dict[Any, list[Any]] = defaultdict(list)  # lanes with one that needs it
        self._lanes: dict[Any, deque[_Transfer]] = defaultdict(deque)
        self._groups: dict[Any, dict[str, int]] = defaultdict(dict)
        self._seen: Counter[Any] = Counter()  # collectives in each lane
        self._arrived: Counter[Any] = Counter()  # transfers that are over, by their keys
        self._promised: Counter[Any] = Counter()  # how many make what a Wait is for
        self._waiting: dict[Any, int] = {}  # what is waited for -> by which kind

    def promise(self, k: int, events: Sequence[Event]) -> None:
        """What kind number ``k`` will send: of messages with one key a receiver waits for the
        last."""
        for e in events:
            if isinstance(e, Message) and e.sends and e.peer in self.kind_of:
                self._promised[k, self.kind_of[e.peer], e.tag, e.number] += 1

    def post(self, k: int, e: Collective | Message) -> Awaited | None:
        """Kind number ``k`` has come to it. What a Wait for it is for; None for who sends."""
        return self._collective(k, e) if isinstance(e, Collective) else self._message(k, e)

    def is_there(self, k: int, awaited: Awaited) -> bool:
        """Has it come? If not, ``k`` is told when it has."""
        if self._arrived[awaited.key] >= self._promised[awaited.key]:
            return True
        self._waiting[awaited.key] = k
        return False

    def _collective(self, k: int, e: Collective) -> Awaited:
        """Groups of one axis are known by their order: another kind is in another one of them."""
        alike = self._groups[k, e.axis, len(e.ranks)]
        lane = e.axis, len(e.ranks), alike.setdefault(e.group, len(alike))
        number = self._seen[k, lane]
        self._seen[k, lane] += 1
        others = {self.kind_of[r] for r in e.ranks if r in self.kind_of} | {k}
        key = k, lane, number
        self._promised[key] = 1
        self._posted.add(key)
        needs = [(o, lane, number) for o in others]
        self._lanes[k, lane].append(_Transfer(key, e, k, needs))
        for need in needs:
            self._followers[need].append((k, lane))
        for follower in self._followers[key]:
            self._start(follower)
        return Awaited(key, "wait for ranks", e)

    def _message(self, k: int, e: Message) -> Awaited | None:
        peer = self.kind_of.get(e.peer)
        if not e.sends:
            return Awaited((peer, k, e.tag, e.number), "wait for a stage", e)
        if peer is not None:
            self._lanes[k, peer].append(_Transfer((k, peer, e.tag, e.number), e, k, []))
            self._start((k, peer))
        return None

    def _start(self, lane: Any) -> None:
        """The first of a lane, if it does not run and all have come to it. On the wire it takes its
        time, and beside that a processor its work."""
        queue = self._lanes[lane]
        if not queue or queue[0].parts or not self._posted.issuperset(queue[0].needs):
            return
        one, network, e = queue[0], self.network, queue[0].e
        sender = self.parties[one.kind]
        if isinstance(e, Collective):
            seconds = network.collective(e.kind, e.nbytes, e.ranks)
        else:
            seconds = network.message(e.nbytes, sender.rank, e.peer)
        work = network.work(e.nbytes)
        one.start, one.parts = self.clock.now, 2 if work else 1
        self.agenda.after(seconds, lambda: self._part_ends(lane, 0))
        if work:
            self.clock.add(sender.ranks)
            until = self.clock.now + work
            self.agenda.at_work(until, lambda: self._part_ends(lane, sender.ranks))

    def _part_ends(self, lane: Any, ranks: int) -> None:
        self.clock.add(-ranks)
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
        if k is not None and self._arrived[one.key] >= self._promised[one.key]:
            del self._waiting[one.key]
            self.resume(k)
