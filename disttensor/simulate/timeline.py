"""When each rank does what: the recorded events of all kinds, run against a device and a network.

A rank has a clock of its host and one of its device. What it sends runs beside what follows, until
somebody waits for it (``transfers``). Every kind is one rank here: what ranks of other kinds do is
taken from theirs.

Where ranks share devices those that compute slow each other down, and so do transfers that a
processor carries out. So what happens is gone through in the order of time, and all clocks are in
seconds of work (``shared_clock``) until the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disttensor.simulate.agenda import Agenda
from disttensor.simulate.devices import Device
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.events import Collective, Event, Gradient, Message, Op, Visit, Wait
from disttensor.simulate.network import Network
from disttensor.simulate.shared_clock import SharedClock
from disttensor.simulate.spans import Row, Span
from disttensor.simulate.transfers import Awaited, Party, Transfers


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
    works: dict[int, Awaited] = field(default_factory=dict)  # what a Wait names

    @property
    def now(self) -> float:
        return max(self.device, self.host)

    def goes_on(self) -> None:
        self.at += 1
        self.row.times.append(self.now)


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
        self.ranks = [_Rank(rank, len(ranks), events) for ranks, rank, events in kinds]
        self.clock = SharedClock(device.sharing, world)
        self.agenda = Agenda(self.clock)
        kind_of = {r: k for k, (ranks, _, _) in enumerate(kinds) for r in ranks}
        parties = [Party(one.rank, one.ranks, one.row) for one in self.ranks]
        self.transfers = Transfers(parties, kind_of, network, self.agenda, self._resume)

    def run(self) -> list[Row]:
        for k, one in enumerate(self.ranks):
            self.transfers.promise(k, one.events)
            self.clock.add(one.ranks)
            self._computes(k)
        self.agenda.run()
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
        (row.end,) = times([one.now])

    def _computes(self, k: int) -> None:
        """All until it communicates, or ends."""
        one, device = self.ranks[k], self.device
        while one.at < len(one.events):
            op = one.events[one.at]
            if isinstance(op, Visit):
                one.host += device.visit
            elif isinstance(op, Gradient):
                one.host += device.gradient
            elif isinstance(op, Op):
                one.host += device.launch
                start = one.now
                one.device = start + device.kernel(op)
                if not device.asynchronous:
                    one.host = one.device
                one.row.spans.append(
                    Span("compute", op.name, op.phase, op.where, start, one.device)
                )
            else:
                break
            one.goes_on()
        self.agenda.at_work(one.now, lambda: self._communicates(k))

    def _communicates(self, k: int) -> None:
        one = self.ranks[k]
        if one.at == len(one.events):
            self.clock.add(-one.ranks)
            return
        event = one.events[one.at]
        if isinstance(event, Collective | Message):
            one.host += self.device.post
            awaited = self.transfers.post(k, event)
            if awaited is not None:
                one.works[event.work] = awaited
        elif isinstance(event, Wait) and event.work in one.works:  # else: started before the step
            if not self.transfers.is_there(k, one.works[event.work]):
                self.clock.add(-one.ranks)
                return
            del one.works[event.work]
        one.goes_on()
        self._computes(k)

    def _resume(self, k: int) -> None:
        one, now = self.ranks[k], self.clock.now
        wait = one.events[one.at]
        assert isinstance(wait, Wait)
        awaited = one.works[wait.work]
        e = awaited.e
        self.clock.add(one.ranks)
        name = e.kind if isinstance(e, Collective) else "receive"
        one.row.spans.append(Span(awaited.lane, name, e.phase, e.where, one.now, now))
        one.device = now
        if not self.device.asynchronous:
            one.host = now
        self._communicates(k)
