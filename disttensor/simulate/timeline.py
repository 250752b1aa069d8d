"""Computes when each rank does what: runs the recorded events of all kinds against a device and a
network.

One rank of each kind is simulated. It has a clock of its host and one of its device. Transfers run
concurrently with the events that follow, until a Wait (``transfers.py``). All clocks are in seconds
of work until the end, because ranks that share a device slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from disttensor.errors import SimulationError
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.events import Collective, Event, Gradient, Message, Name, Op, Visit, Wait
from disttensor.simulate.transfers import (
    Clock,
    Party,
    PendingTransfer,
    RankRow,
    Span,
    Transfers,
)

Kinds = Sequence[tuple[Sequence[int], int, Sequence[Event]]]


def timelines(kinds: Kinds, world: int, device: Device, network: Network) -> list[RankRow]:
    """Returns the time line of each kind of rank.

    Args:
        kinds: for each kind its ranks, the rank that was recorded, and its events.
        world: the number of ranks.
        device: the costs of kernels and of the host.
        network: the costs of transfers.

    Raises:
        SimulationError: if a rank waits for a transfer that no other rank starts.
    """
    return _Simulation(kinds, world, device, network).run()


@dataclass
class _Rank(Party):
    """One kind, and how far it is. ``pending``: the transfers that a Wait may name."""

    events: Sequence[Event]
    at: int = 0
    host: float = 0.0
    device: float = 0.0
    pending: dict[Name, PendingTransfer] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return max(self.device, self.host)

    def advance(self) -> None:
        self.at += 1
        self.row.times.append(self.now)


class _Simulation:
    def __init__(self, kinds: Kinds, world: int, device: Device, network: Network) -> None:
        self.device = device
        self.ranks = [_Rank(rank, len(ranks), events) for ranks, rank, events in kinds]
        self.clock = Clock(device.sharing, world)
        kind_of = {r: k for k, (ranks, _, _) in enumerate(kinds) for r in ranks}
        self.transfers = Transfers(self.ranks, kind_of, network, self.clock, self._resume)

    def run(self) -> list[RankRow]:
        for k, one in enumerate(self.ranks):
            self.transfers.expect(k, one.events)
            self.clock.add_busy(one.ranks)
            self._compute(k)
        self.clock.run()
        for one in self.ranks:
            if one.at < len(one.events):
                raise SimulationError(
                    f"simulated deadlock: rank {one.rank} waits at event {one.at} of "
                    f"{len(one.events)} for a transfer that no other kind of rank starts: ranks of "
                    "different kinds do not run the same program"
                )
            self._convert_to_time(one)
        return [one.row for one in self.ranks]

    def _convert_to_time(self, one: _Rank) -> None:
        """Converts a time line from seconds of work to seconds of the step."""
        row, times = one.row, self.clock.times
        starts, ends = times([s.start for s in row.spans]), times([s.end for s in row.spans])
        row.spans = [
            s._replace(start=a, end=b) for s, a, b in zip(row.spans, starts, ends, strict=True)
        ]
        row.times = times(row.times)
        (row.end,) = times([one.now])

    def _compute(self, k: int) -> None:
        """Runs kind number ``k`` up to its next communication, or to its end."""
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
            one.advance()
        self.clock.call_at_work(one.now, lambda: self._communicate(k))

    def _communicate(self, k: int) -> None:
        one = self.ranks[k]
        if one.at == len(one.events):
            self.clock.add_busy(-one.ranks)
            return
        event = one.events[one.at]
        if isinstance(event, Collective | Message):
            one.host += self.device.post
            pending = self.transfers.post(k, event)
            if pending is not None:
                one.pending[event.work] = pending
        elif isinstance(event, Wait) and event.work in one.pending:  # else: started before the step
            if not self.transfers.wait(k, one.pending[event.work]):
                self.clock.add_busy(-one.ranks)
                return
            del one.pending[event.work]
        one.advance()
        self._compute(k)

    def _resume(self, k: int) -> None:
        one, now = self.ranks[k], self.clock.now
        wait = one.events[one.at]
        assert isinstance(wait, Wait)
        _, lane, e = one.pending[wait.work]
        self.clock.add_busy(one.ranks)
        name = e.kind if isinstance(e, Collective) else "receive"
        one.row.spans.append(Span(lane, name, e.phase, e.where, one.now, now))
        one.device = now
        if not self.device.asynchronous:
            one.host = now
        self._communicate(k)
