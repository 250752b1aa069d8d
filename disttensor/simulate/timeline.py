"""Computes when each rank does what: runs the recorded events of all kinds against a device and a
network.

One rank of each kind is simulated. It has a clock of its host and one of its device. Transfers run
concurrently with the events that follow, until a Wait (``transfers.py``). All clocks are in seconds
of work until the end, because ranks that share a device slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disttensor.errors import SimulationError
from disttensor.simulate.costs import Costs, event_costs
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.events import Collective, Event, Message, Name, Op, Wait
from disttensor.simulate.measured import Measured
from disttensor.simulate.transfers import (
    Clock,
    Party,
    PendingTransfer,
    RankRow,
    Span,
    Transfers,
)

Kinds = Sequence[tuple[Sequence[int], int, Sequence[Event]]]


def timelines(
    kinds: Kinds, world: int, device: Device, network: Network, measured: Measured | None = None
) -> list[RankRow]:
    """Returns the time line of each kind of rank.

    Args:
        kinds: for each kind its ranks, the rank that was recorded, and its events.
        world: the number of ranks.
        device: the costs of kernels and of the host.
        network: the costs of transfers.
        measured: the times of some ranks between transfers, in place of the device's costs.

    Raises:
        SimulationError: if a rank waits for a transfer that no other rank starts.
    """
    costs = event_costs([(ranks, events) for ranks, _, events in kinds], device, measured)
    return _Simulation(kinds, costs, world, device, network).run()


class _Simulation:
    def __init__(
        self, kinds: Kinds, costs: Sequence[Costs], world: int, device: Device, network: Network
    ) -> None:
        self.device, self.costs = device, costs
        self.ranks = [Party(rank, len(ranks), events) for ranks, rank, events in kinds]
        self.clock = Clock(device.sharing, world)
        kind_of = {r: k for k, (ranks, _, _) in enumerate(kinds) for r in ranks}
        self.transfers = Transfers(self.ranks, kind_of, network, self.clock, self._continue)
        self.running = [self._run_events(k) for k in range(len(kinds))]

    def run(self) -> list[RankRow]:
        for k in range(len(self.ranks)):
            self.transfers.expect(k)
            self._continue(k)
        self.clock.run()
        for one in self.ranks:
            if len(one.row.times) < len(one.events):
                raise SimulationError(
                    f"simulated deadlock: rank {one.rank} waits at event {len(one.row.times)} of "
                    f"{len(one.events)} for a transfer that no other kind of rank starts: ranks of "
                    "different kinds do not run the same program"
                )
            self._convert_to_time(one)
        return [one.row for one in self.ranks]

    def _convert_to_time(self, one: Party) -> None:
        """Converts a time line from seconds of work to seconds of the step."""
        row, times = one.row, self.clock.times
        starts, ends = times([s.start for s in row.spans]), times([s.end for s in row.spans])
        row.spans = [
            s._replace(start=a, end=b) for s, a, b in zip(row.spans, starts, ends, strict=True)
        ]
        row.times = times(row.times)
        (row.end,) = times([one.now])

    def _continue(self, k: int) -> None:
        """Runs kind number ``k`` up to its next communication, or to its end."""
        until = next(self.running[k], None)
        if until is not None:
            self.clock.call_at_work(until, lambda: self._continue(k))

    def _run_events(self, k: int) -> Iterator[float | None]:
        """Yields the work after which kind number ``k`` continues, or None: when a transfer has
        arrived."""
        one, device = self.ranks[k], self.device
        pending: dict[Name, PendingTransfer] = {}  # the transfers that a Wait may name
        self.clock.add_busy(one.ranks)
        for event, (host, kernel) in zip(one.events, self.costs[k], strict=True):
            if isinstance(event, Op):
                one.host += host
                start = one.now
                one.device = start + kernel
                if not device.asynchronous:
                    one.host = one.device
                one.row.spans.append(
                    Span("compute", event.name, event.phase, event.where, start, one.device)
                )
            elif isinstance(event, Collective | Message):
                yield one.now
                one.host += host
                posted = self.transfers.post(k, event)
                if posted is not None:
                    pending[event.work] = posted
            elif isinstance(event, Wait):
                yield one.now
                if event.work in pending:  # else: started before the step
                    awaited = pending.pop(event.work)
                    if not self.transfers.wait(k, awaited):
                        self.clock.add_busy(-one.ranks)
                        yield None
                        self._end_wait(one, awaited)
                one.host += host
            else:
                one.host += host
            one.row.times.append(one.now)
        yield one.now
        self.clock.add_busy(-one.ranks)

    def _end_wait(self, one: Party, awaited: PendingTransfer) -> None:
        _, lane, e = awaited
        now = self.clock.now
        self.clock.add_busy(one.ranks)
        name = e.kind if isinstance(e, Collective) else "receive"
        one.row.spans.append(Span(lane, name, e.phase, e.where, one.now, now))
        one.device = now
        if not self.device.asynchronous:
            one.host = now
