"""The time of each event of a step on the host and on the device: by the fields of a Device, or by
measured steps of some ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise

from disttensor.errors import SimulationError
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Collective, Event, Gradient, Message, Op, Visit, Wait
from disttensor.simulate.measured import Measured

Costs = list[tuple[float, float]]  # of each event: seconds of the host, and of the device


def event_costs(
    kinds: Sequence[tuple[Sequence[int], Sequence[Event]]], device: Device,
    measured: Measured | None,
) -> list[Costs]:  # fmt: skip
    """Returns the costs of the events of each kind.

    The events of a measured rank between two transfers take the measured time together, each a part
    in the proportion of the device's costs. The events of other ranks take as long as equal events
    of measured ranks on average.

    Args:
        kinds: of each kind its ranks and its events.
        device: the costs of kernels and of the host.
        measured: the times of some ranks between their transfers.

    Raises:
        SimulationError: if a measured rank has other transfers than the simulated one, or if no
            rank of these kinds was measured.
    """
    modelled = [[_modelled(event, device) for event in events] for _, events in kinds]
    if measured is None:
        return modelled
    found: dict[int, Costs] = {}
    factors: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for k, (ranks, events) in enumerate(kinds):
        rank = next((r for r in ranks if r in measured.ranks), None)
        if rank is not None:
            found[k] = _divided(events, modelled[k], measured, rank)
            for event, real, cost in zip(events, found[k], modelled[k], strict=True):
                for key in (_key(event), None):  # None: of all events
                    factors[key][0] += sum(real)
                    factors[key][1] += sum(cost)
    if not found:
        raise SimulationError(
            f"simulate: measured: ranks {[*measured.ranks]} were measured, and the report is of "
            "other ones: measure a rank of it"
        )
    for k, (_, events) in enumerate(kinds):
        if k not in found:
            pairs = (factors.get(_key(e)) or factors[None] for e in events)
            found[k] = [
                (host * real / cost, kernel * real / cost) if cost else (host, kernel)
                for (host, kernel), (real, cost) in zip(modelled[k], pairs, strict=True)
            ]
    return [found[k] for k in range(len(kinds))]


def _modelled(event: Event, device: Device) -> tuple[float, float]:
    if isinstance(event, Op):
        return device.launch, device.kernel(event)
    if isinstance(event, Visit):
        return device.visit, 0.0
    if isinstance(event, Gradient):
        return device.gradient, 0.0
    return (0.0 if isinstance(event, Wait) else device.post), 0.0


def _divided(events: Sequence[Event], costs: Costs, measured: Measured, rank: int) -> Costs:
    """Returns the costs of a measured rank."""
    cuts = [i for i, e in enumerate(events) if isinstance(e, Collective | Message | Wait)]
    spent = measured.ranks[rank]
    names = [type(events[i]).__name__ for i in cuts]
    if [*names, "end"] != [name for name, _ in spent]:
        raise SimulationError(
            f"simulate: measured: rank {rank} begins or awaits {len(spent) - 1} transfers in the "
            f"measured step, and {len(cuts)} or others in the simulated step. Measure the program "
            "that is simulated; its transfers have to be independent of the values of tensors"
        )
    out: Costs = []
    for (begin, end), (_, seconds) in zip(pairwise([0, *cuts, len(events)]), spent, strict=True):
        part = costs[begin:end]
        whole = sum(map(sum, part))
        if whole:
            out += [(host * seconds / whole, kernel * seconds / whole) for host, kernel in part]
        elif part:  # a wait
            out += [(seconds, 0.0), *part[1:]]
    return out


def _key(event: Event) -> Hashable:
    """Returns a key that equal kernels have in common, and all events of another type."""
    if isinstance(event, Op):
        return event.name, event.flops, event.nbytes, event.dtype, event.causal
    return type(event).__name__
