"""What a strategy would cost, from figures of one rank without stages: seconds that order
strategies before any of them is simulated, and bytes below which it does not get.

A stage has its layers' share of the forward, of the backward, of the parameters and of what is
kept; kernels and collectives of a smaller micro-batch have that much less to do; the rest is the
schedule's bubble (``Schedule.bubble``), and what of the gradients' way over the network the last
backward does not hide, and what the host takes for visits. Messages to the stage before wait for
the gradients of a stage. Collectives over cp are those of attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from disttensor import pipeline
from disttensor.parallel.degrees import Degrees, ranks_over
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.partition import balanced
from disttensor.pipeline.schedules import NAMES
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.events import Collective, Event, Op
from disttensor.simulate.probe import Layer, Probe

_MIB = 1 << 20
_SEGMENT = 32.0  # MiB, where a strategy has no segments


@dataclass(frozen=True)
class Estimate:
    """``seconds`` of a step by ``parts``: computes, collectives, bubble; ``memory``: bytes of the
    fullest rank at least."""

    parts: Mapping[str, float]
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Micro:
    """One micro-batch: seconds of each layer's forward and backward without a recomputation, what
    of the forward, and of both, is communication, and for how long the host has nothing to do."""

    forward: list[float]
    backward: list[float]
    sends: list[float]
    all_sends: list[float]
    idle: list[float]


class Estimator:
    """Estimates from one probe, of which the tp counts."""

    def __init__(self, probe: Probe, world: int, device: Device, network: Network) -> None:
        self.probe, self.world, self.device, self.network = probe, world, device, network
        self.degrees = probe.strategy.degrees(world)
        self.sizes = [layer.elements for layer in probe.layers]
        self._micro: dict[Any, _Micro] = {}
        self._visits: dict[Any, list[list[list[int]]]] = {}
        self._tail: float | None = None

    def micro_rows(self, data: int, cp: int, steps: int) -> float:
        """The part of the probe's micro-batch that one of a strategy is."""
        rows, mine = self.probe.rows, self.degrees.dp * self.degrees.sharding
        if rows is None:
            return mine / data / steps / cp
        return math.ceil(math.ceil(rows / steps) / data) / math.ceil(rows / mine) / cp

    def __call__(self, strategy: Strategy, again: frozenset[str]) -> Estimate:
        """``again``: names of the layers that keep nothing. Raises ValueError for a schedule that
        cannot be, and for more stages than layers."""
        d = strategy.degrees(self.world)
        steps = strategy.accumulate_steps
        share = self.micro_rows(d.dp * d.sharding, d.cp, steps)
        micro = self._of_micro_batch(share, d.cp)
        layers = self.probe.layers
        repeats = [layer.name in again for layer in layers]
        forward = micro.forward
        backward = [b + f * r for b, f, r in zip(micro.backward, forward, repeats, strict=True)]
        visits = self._stages(strategy.schedule, d.pp)
        chunks = sum(map(len, visits)) // d.pp
        ratio = round(2 * sum(backward) / max(sum(forward), 1e-12)) / 2
        idle, live, actions = _of_schedule(strategy.schedule, d.pp, steps, chunks, ratio)
        host = self._host(visits, actions, micro.idle, d.sharding > 1)
        busy, mean = _loads(visits, forward, backward, host)
        repeated = [s * r for s, r in zip(micro.sends, repeats, strict=True)]
        sends, _ = _loads(visits, [a + b for a, b in zip(micro.all_sends, repeated, strict=True)])
        fullest = self._fullest(visits)
        exposed = self._gradients(strategy, d, visits, busy, backward)
        optimizer = self._optimizer(fullest, d, strategy)
        computes, waits = steps * (busy - sends) + optimizer, steps * sends + exposed
        bubble = idle * mean + self._messages(d, visits, share)
        shared = self.device.sharing * (steps * (mean - sends) + optimizer)
        if shared > computes:  # ranks compute in the bubbles of each other
            computes, bubble = shared, max(0.0, computes + bubble - shared)
        parts = {"computes": computes, "collectives": waits, "bubble": bubble}
        memory = max(
            self._memory(strategy, d, stage, n, share, repeats)
            for stage, n in zip(visits, live, strict=True)
        )
        return Estimate(parts, memory)

    # One micro-batch ------------------------------------------------------------------------------

    def _of_micro_batch(self, share: float, cp: int) -> _Micro:
        found = self._micro.get((share, cp))
        if found is None:
            found = self._micro[share, cp] = self._measured(share, cp)
        return found

    def _measured(self, share: float, cp: int) -> _Micro:
        probe = self.probe
        computes = [self._kernels(layer.events, share) for layer in probe.layers]
        sends = [self._sent(layer.events, share) for layer in probe.layers]
        computes[-1] += self._kernels(probe.events["forward"], share)
        sends[-1] += self._sent(probe.events["forward"], share)
        over_cp = [self._over_cp(layer, share, cp) for layer in probe.layers]
        back = self._kernels(probe.events["backward"], share)
        total, sent = sum(computes) or 1.0, sum(sends) or 1.0
        again = self._sent(probe.events["backward"], share) / sent
        ways = [s * again + over for s, over in zip(sends, over_cp, strict=True)]
        sends = [s + over for s, over in zip(sends, over_cp, strict=True)]
        forward = [c + s for c, s in zip(computes, sends, strict=True)]
        backward = [back * c / total + w for c, w in zip(computes, ways, strict=True)]
        both = [s + w for s, w in zip(sends, ways, strict=True)]
        free = [0.0] * len(forward)
        if self.device.asynchronous:
            free = [self._free(layer.events, share) for layer in probe.layers]
            back_free = self._free(probe.events["backward"], share)
            free = [f + back_free * c / total for f, c in zip(free, computes, strict=True)]
        return _Micro(forward, backward, sends, both, free)

    def _over_cp(self, layer: Layer, share: float, cp: int) -> float:
        """Seconds of the forward of an attention over cp, and of its backward: all-to-alls of
        queries, keys, values and results, which are no more than the gathers of keys and values
        that other policies send."""
        if cp == 1 or layer.of != _most(self.probe):
            return 0.0
        nbytes = 4 * layer.input / self.degrees.tp * share * (cp - 1) / cp
        ranks = range(0, cp * self.degrees.tp, self.degrees.tp)
        return self._collective("all_to_all", nbytes, ranks)

    def _kernels(self, events: Sequence[Event], share: float) -> float:
        """Seconds of the kernels: of the device and the host, beside each other or not."""
        device, host = self._both(events, share)
        return max(device, host) if self.device.asynchronous else device + host

    def _free(self, events: Sequence[Event], share: float) -> float:
        """Seconds that the kernels take longer than the host needs for them."""
        device, host = self._both(events, share)
        return max(device - host, 0.0)

    def _both(self, events: Sequence[Event], share: float) -> tuple[float, float]:
        ops = [e for e in events if isinstance(e, Op)]
        return sum(self.device.kernel(e, share) for e in ops), len(ops) * self.device.launch

    def _host(
        self, visits: Any, actions: float, free: Sequence[float], shards: bool
    ) -> list[float]:
        """Of each stage, seconds of a micro-batch that the host takes for its visits, messages and
        gradients of parameters in shards, and that kernels do not hide. In the middle each visit
        gets and sends."""
        device, pp, layers = self.device, len(visits), self.probe.layers
        out = []
        for s, stage in enumerate(visits):
            messages = 4 * len(stage) - 2 * (s == 0) - 2 * (s == pp - 1) if pp > 1 else 0
            taken = messages * device.post
            if pp > 1 or self.probe.visits:
                taken += actions * device.visit
            if shards:
                taken += device.gradient * sum(layers[i].parameters for v in stage for i in v)
            out.append(max(taken - sum(free[i] for v in stage for i in v), 0.0))
        return out

    def _sent(self, events: Sequence[Event], share: float) -> float:
        """Seconds of the collectives within tp."""
        mine = range(self.degrees.tp)
        return sum(
            self._collective(e.kind, e.nbytes * share, e.ranks)
            for e in events
            if isinstance(e, Collective) and e.ranks[-1] in mine and len(e.ranks) > 1
        )

    def _collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one that is waited for; where processors carry it, ranks that share one carry
        theirs in turns."""
        return self.network.collective(kind, nbytes, ranks) + self._carries(nbytes)

    def _carries(self, nbytes: float) -> float:
        """Seconds of the processor, and of the host where nothing runs beside it."""
        host = 0.0 if self.device.asynchronous else self.device.post
        return host + self.device.sharing * self.network.work(nbytes)

    # Stages ---------------------------------------------------------------------------------------

    def _stages(self, schedule: str, pp: int) -> list[list[list[int]]]:
        """Of each stage, the layers of each of its visits."""
        found = self._visits.get((schedule, pp))
        if found is None:
            found = self._visits[schedule, pp] = self._dealt(schedule, pp)
        return found

    def _dealt(self, schedule: str, pp: int) -> list[list[list[int]]]:
        builtin, count = NAMES[schedule], len(self.probe.layers)
        number = pp * (2 if builtin.needs_stages else 1)
        if pp == 1:
            return [[list(range(count))]]
        if number > count:
            raise ValueError(f"{number} visits of {count} layers")
        counts = [count // number + (i < count % number) for i in range(number)]
        if self.probe.balance is not None:
            costs = self.probe.balance
            if isinstance(costs, str):
                costs = (
                    self.sizes if costs == "parameters" else self._of_micro_batch(1.0, 1).forward
                )
            counts = balanced([("", None)] * count, number, costs)  # type: ignore[list-item]
        ends = [0, *itertools.accumulate(counts)]
        dealt = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        back = dealt[pp:][::-1] if builtin.shape == "v" else dealt[pp:]
        return [[dealt[i], *back[i : i + 1]] for i in range(pp)]

    def _bytes(self, visits: Sequence[Sequence[int]]) -> float:
        """Of the parameters in these layers, on a rank that holds them whole."""
        whole = self.probe.held["parameters"]
        return whole * sum(self.sizes[i] for v in visits for i in v) / max(sum(self.sizes), 1)

    def _fullest(self, visits: Any) -> Any:
        return max(visits, key=self._bytes)

    def _messages(self, d: Degrees, visits: Any, share: float) -> float:
        """From the first stage to the last, and back."""
        if d.pp == 1:
            return 0.0
        way = len(visits) * len(visits[0]) - 1
        nbytes = max(layer.input for layer in self.probe.layers) * share
        return 2 * way * self.network.message(nbytes, 0, self.world // d.pp)

    def _optimizer(self, visits: Any, d: Degrees, strategy: Strategy) -> float:
        if self._tail is None:
            self._tail = self._kernels(self.probe.events["last"], 1.0)
        part = self._bytes(visits) / max(self.probe.held["parameters"], 1)
        return self._tail * part / (d.sharding if d.sharding > 1 else 1)

    # Gradients and memory -------------------------------------------------------------------------

    def _gradients(
        self, strategy: Strategy, d: Degrees, visits: Any, busy: float, backward: Sequence[float]
    ) -> float:
        """Seconds that nothing hides of what dp, sharding and cp send for gradients. A stage hears
        from the next one after the gradients of that are on their way, so these add up."""
        within, at_end = 0.0, 0.0
        cut = d.pp > 1 and strategy.segments is None  # then each layer is a segment
        size = getattr(strategy.segments, "megabytes", _SEGMENT) * _MIB
        for stage in visits:
            nbytes = self._bytes(stage)
            pieces = sum(map(len, stage)) if cut else max(1, math.ceil(nbytes / size))
            last = sum(backward[i] for v in stage for i in v)
            mine, end = self._of_stage(strategy, d, nbytes, pieces, busy, last)
            within, at_end = max(within, mine), at_end + end
        return within + at_end

    def _of_stage(
        self, strategy: Strategy, d: Degrees, nbytes: float, pieces: int, busy: float, last: float
    ) -> tuple[float, float]:
        """Of one stage, during the step and behind its last backward: a micro-batch takes ``busy``,
        and the ``last`` backward some of it; what a processor itself carries is never hidden."""
        stage, n, steps = strategy.zero_stage or 3, d.sharding, strategy.accumulate_steps
        low = 0.5 if strategy.amp else 1.0

        def takes(kind: str, sent: float, *axes: str) -> float:
            ranks = ranks_over(d, 0, axes)[0]
            return pieces * self.network.collective(kind, sent / pieces, ranks)

        def carries(sent: float) -> float:
            return pieces * self._carries(sent / pieces)

        def exposed(seconds: float, beside: float) -> float:
            """The first or the last piece has nothing beside it."""
            return max(seconds - beside, seconds / pieces)

        out = at_end = 0.0
        if n > 1:
            once = nbytes * (n - 1) / n
            gather, scatter = takes("all_gather", once * low, "sharding"), 0.0
            if stage == 1:
                at_end = takes("all_reduce", 2 * once, "sharding")
            else:
                at_end = scatter = takes("reduce_scatter", once, "sharding")
            if stage == 3:
                times = 2 - 1 / pieces  # the last piece is there for the backward
                out += (steps - 1) * exposed(times * gather + scatter, busy)
                out += exposed(times * gather, busy)
                out += steps * times * carries(once * low)
            else:
                out += gather + (steps - 1) * exposed(scatter, last) + carries(once * low)
            out += carries(2 * once) if stage == 1 else steps * carries(once)
        replicas = d.dp * d.cp
        if replicas > 1:
            sent = 2 * nbytes / n * (replicas - 1) / replicas
            at_end += takes("all_reduce", sent, "dp", "cp")
            out += carries(sent)
        return out, exposed(at_end, last)

    def _memory(
        self, strategy: Strategy, d: Degrees, visits: Any, live: int, share: float,
        repeats: Sequence[bool],
    ) -> float:  # fmt: skip
        held, layers = self._bytes(visits), self.probe.layers
        state = held * self.probe.held["optimizer state"] / max(self.probe.held["parameters"], 1)
        n, stage = d.sharding, strategy.zero_stage or 3
        low = 0.5 if strategy.amp and n > 1 else 1.0
        params = gradients = held
        if n > 1:
            state /= n
            gathered = max((self._bytes([[i]]) for v in visits for i in v), default=0.0)
            params = held / n + (held if stage < 3 else min(held, gathered)) * low
            gradients = held if stage == 1 else held / n
        kept = again = 0.0
        for i in (i for v in visits for i in v):
            copy = self._bytes([[i]]) / 2 if strategy.amp else 0.0  # of what autocast has cast
            mine = max(layers[i].kept - copy, 0.0) * share + (copy if n == 1 else 0.0)
            kept += layers[i].input * share if repeats[i] else mine
            again = max(again, mine if repeats[i] else 0.0)
            if i == len(layers) - 1:
                kept += self.probe.loss * share
        kept = kept * live / len(visits) + again
        if strategy.accumulate_steps == 1:  # each gradient takes the place of what is kept
            return params + state + max(kept, gradients)
        return params + state + gradients + kept


def _loads(
    visits: Any, forward: Sequence[float], backward: Sequence[float] = (),
    host: Sequence[float] = (),
) -> tuple[float, float]:  # fmt: skip
    """Of a micro-batch: seconds of the stage that takes longest, and the mean of one. Forwards and
    backwards are of layers, ``host`` of stages."""
    both = [f for f in (forward, backward) if f]
    of = [sum(each[i] for each in both for v in stage for i in v) for stage in visits]
    of = [a + b for a, b in zip(of, host or [0.0] * len(of), strict=True)]
    return max(of), sum(of) / len(of)


@cache
def _of_schedule(
    name: str, pp: int, steps: int, chunks: int, ratio: float
) -> tuple[float, list[int], float]:
    """How long a stage is idle, in forwards and backwards of one micro-batch, of how many visits
    each one holds something, and how many actions it has for a micro-batch."""
    if pp == 1:
        return 0.0, [1], 2
    schedule = pipeline.named(name, pp, steps, chunks)
    bubble = schedule.bubble(1.0, max(ratio, 0.5))
    live = [schedule.peak(s) for s in range(pp)]
    return steps * bubble / (1 - bubble), live, len(schedule.orders[0]) / steps


@cache
def _most_of(kinds: tuple[str, ...]) -> str:
    return max(kinds, key=kinds.count)


def _most(probe: Probe) -> str:
    return _most_of(tuple(layer.of for layer in probe.layers))
