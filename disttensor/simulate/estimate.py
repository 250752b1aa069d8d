"""Estimates the time and the memory of a strategy from the recorded step of one rank without
stages (a Probe). Estimates order strategies before any of them is simulated.

Model. A stage has its layers' share of the forward, the backward, the parameters and the kept
memory. Kernels and collectives of a smaller micro-batch have proportionally less to do. To these
are added the bubble of the schedule (``Schedule.bubble``), the part of the gradients' communication
that the last backward does not hide, and the time of the host for visits. A stage sends to the
stage before after its gradients are on their way. Collectives over cp belong to attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from disttensor import pipeline
from disttensor.parallel.degrees import Degrees, ranks_over
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.partition import divide_layers
from disttensor.pipeline.schedule import virtual
from disttensor.pipeline.schedules import NAMES
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.events import Collective, Event, Op
from disttensor.simulate.probe import Probe

_MIB = 1 << 20
_SEGMENT = 32.0  # MiB, if a strategy has no segments
Stages = list[list[int]]  # the layers of each stage
Costs = list[float]  # of each layer


@dataclass(frozen=True)
class Estimate:
    """``seconds`` of a step by ``parts``: computes, collectives, bubble; ``memory``: a lower bound
    of the bytes of the fullest rank."""

    parts: Mapping[str, float]
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class _LayerCost(NamedTuple):
    """The seconds of a layer for one micro-batch: forward and backward without recomputation, the
    communication in the forward and in both, and the time in which the host is idle."""

    forward: float
    backward: float
    sends: float
    all_sends: float
    idle: float


class Estimator:
    """Estimates strategies with the tp of ``probe``."""

    def __init__(self, probe: Probe, world: int, device: Device, network: Network) -> None:
        self.probe, self.world, self.device, self.network = probe, world, device, network
        self.degrees = probe.strategy.degrees(world)
        self.sizes = [layer.elements for layer in probe.layers]
        kinds = [layer.kind for layer in probe.layers]
        self.block = max(kinds, key=kinds.count, default="")  # the kind of most layers
        self.tail = self._kernels(probe.events["last"], 1.0)[0]
        self._micro_batch = cache(self._cost_of_micro_batch)
        self._stages = cache(self._layers_of_stages)

    def __call__(self, strategy: Strategy, recomputed: frozenset[str]) -> Estimate:
        """Estimates a strategy. ``recomputed``: names of layers that keep only their input. Raises
        ValueError for an invalid schedule, and for more stages than layers."""
        d, steps = strategy.degrees(self.world), strategy.accumulate_steps
        share = self.micro_rows(d.dp * d.sharding, d.cp, steps)
        costs = self._micro_batch(share, d.cp)
        repeats = [layer.name in recomputed for layer in self.probe.layers]
        forward = [c.forward for c in costs]
        backward = [c.backward + c.forward * r for c, r in zip(costs, repeats, strict=True)]
        again = [c.sends * r for c, r in zip(costs, repeats, strict=True)]
        stages, chunks = self._stages(strategy.schedule, d.pp)
        ratio = round(2 * sum(backward) / max(sum(forward), 1e-12)) / 2
        idle, live, actions = _of_schedule(strategy.schedule, d.pp, steps, chunks, ratio)
        host = self._host(stages, chunks, actions, [c.idle for c in costs], d)
        busy, mean = _loads(stages, forward, backward, host)
        sends, _ = _loads(stages, [c.all_sends for c in costs], again)
        fullest = max(stages, key=self._bytes)
        part = self._bytes(fullest) / max(self.probe.held["parameters"], 1)
        optimizer = self.tail * part / d.sharding
        computes = steps * (busy - sends) + optimizer
        waits = steps * sends + self._gradients(strategy, d, stages, busy, backward)
        others = (d.pp * mean - busy) / max(d.pp - 1, 1)  # what the fullest stage waits for
        bubble = idle * others + self._messages(d, chunks, share)
        shared = self.device.sharing * (steps * (mean - sends) + optimizer)
        if shared > computes:  # ranks compute in the bubbles of each other
            computes, bubble = shared, max(0.0, computes + bubble - shared)
        memory = max(
            self._memory(strategy, d, stage, held / chunks, share, repeats)
            for stage, held in zip(stages, live, strict=True)
        )
        return Estimate({"computes": computes, "collectives": waits, "bubble": bubble}, memory)

    def micro_rows(self, data: int, cp: int, steps: int) -> float:
        """Returns the size of a strategy's micro-batch as a part of the probe's."""
        rows, mine = self.probe.rows, self.degrees.dp * self.degrees.sharding
        if rows is None:
            return mine / data / steps / cp
        return math.ceil(math.ceil(rows / steps) / data) / math.ceil(rows / mine) / cp

    # One micro-batch ------------------------------------------------------------------------------

    def _cost_of_micro_batch(self, share: float, cp: int) -> list[_LayerCost]:
        layers, outside = self.probe.layers, self.probe.events
        kernels = [self._kernels(layer.events, share) for layer in layers]
        computes = [seconds for seconds, _ in kernels]
        sends = [self._collectives(layer.events, share) for layer in layers]
        computes[-1] += self._kernels(outside["forward"], share)[0]
        sends[-1] += self._collectives(outside["forward"], share)
        back, back_idle = self._kernels(outside["backward"], share)
        total, sent = sum(computes) or 1.0, sum(sends) or 1.0
        again = self._collectives(outside["backward"], share) / sent
        costs = []
        for layer, compute, send, (_, idle) in zip(layers, computes, sends, kernels, strict=True):
            over_cp = self._over_cp(layer.input * share, cp) * (layer.kind == self.block)
            part, there, back_send = compute / total, send + over_cp, send * again + over_cp
            costs.append(_LayerCost(
                compute + there, back * part + back_send, there, there + back_send,
                idle + back_idle * part,
            ))  # fmt: skip
        return costs

    def _kernels(self, events: Sequence[Event], share: float) -> tuple[float, float]:
        return self.device.seconds_of([e for e in events if isinstance(e, Op)], share)

    def _collectives(self, events: Sequence[Event], share: float) -> float:
        """Returns the seconds of the collectives within tp."""
        mine = range(self.degrees.tp)
        return sum(
            self._collective(e.kind, e.nbytes * share, e.ranks)
            for e in events
            if isinstance(e, Collective) and e.ranks[-1] in mine and len(e.ranks) > 1
        )

    def _over_cp(self, nbytes: float, cp: int) -> float:
        """Returns the seconds of the forward of an attention over cp, and of its backward, for an
        input of ``nbytes``: all-to-alls of queries, keys, values and results, which send at least
        as much as the gathers of keys and values of other policies."""
        if cp == 1:
            return 0.0
        ranks = range(0, cp * self.degrees.tp, self.degrees.tp)
        return self._collective("all_to_all", 4 * nbytes / self.degrees.tp * (cp - 1) / cp, ranks)

    def _collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective that is waited for."""
        return self.network.collective(kind, nbytes, ranks) + self._copies(nbytes)

    def _copies(self, nbytes: float) -> float:
        """Returns the seconds of a transfer that nothing hides: of processors, which ranks that
        share one use in turn, and of a host that waits for each kernel."""
        host = 0.0 if self.device.asynchronous else self.device.post
        return host + self.device.sharing * self.network.work(nbytes)

    # Stages ---------------------------------------------------------------------------------------

    def _layers_of_stages(self, schedule: str, pp: int) -> tuple[Stages, int]:
        """Returns the layers of each stage, and the number of its visits."""
        builtin, count = NAMES[schedule], len(self.probe.layers)
        if pp == 1:
            return [list(range(count))], 1
        chunks = 2 if builtin.needs_stages else 1
        number = pp * chunks
        if number > count:
            raise ValueError(f"{number} visits of {count} layers")
        costs = self.probe.balance
        if isinstance(costs, str):
            is_by_size = costs == "parameters"
            costs = self.sizes if is_by_size else [c.forward for c in self._micro_batch(1.0, 1)]
        ends = [0, *itertools.accumulate(divide_layers(count, number, costs))]
        visits = [[virtual(builtin.shape, pp, s, c) for c in range(chunks)] for s in range(pp)]
        return [[i for v in of for i in range(ends[v], ends[v + 1])] for of in visits], chunks

    def _bytes(self, layers: Sequence[int]) -> float:
        """Returns the bytes of the parameters of these layers, on a rank that holds all of them."""
        whole = self.probe.held["parameters"]
        return whole * sum(self.sizes[i] for i in layers) / max(sum(self.sizes), 1)

    def _host(
        self, stages: Stages, chunks: int, actions: float, idle: Costs, d: Degrees
    ) -> list[float]:
        """Returns for each stage the seconds of a micro-batch in which the host works on visits,
        messages and gradients of sharded parameters, and kernels do not hide it."""
        device, layers, out = self.device, self.probe.layers, []
        for s, stage in enumerate(stages):
            # a visit receives and sends, except at the ends
            messages = 4 * chunks - 2 * (s == 0) - 2 * (s == d.pp - 1) if d.pp > 1 else 0
            visits = actions if d.pp > 1 or self.probe.visits else 0
            gradients = sum(layers[i].parameters for i in stage) if d.sharding > 1 else 0
            taken = messages * device.post + visits * device.visit + device.gradient * gradients
            out.append(max(taken - sum(idle[i] for i in stage), 0.0))
        return out

    def _messages(self, d: Degrees, chunks: int, share: float) -> float:
        """Returns the seconds of the messages from the first stage to the last, and back."""
        nbytes = max(layer.input for layer in self.probe.layers) * share
        return 2 * (d.pp * chunks - 1) * self.network.message(nbytes, 0, self.world // d.pp)

    # Gradients and memory -------------------------------------------------------------------------

    def _gradients(
        self, strategy: Strategy, d: Degrees, stages: Stages, busy: float, backward: Costs
    ) -> float:
        """Returns the seconds of the communication of dp, sharding and cp that nothing hides. The
        ends of the stages add up, because a stage receives from the next one after the gradients of
        that stage are on their way."""
        is_cut = d.pp > 1 and strategy.segments is None  # then each layer is a segment
        size = getattr(strategy.segments, "megabytes", _SEGMENT) * _MIB
        within, at_end = 0.0, 0.0
        for stage in stages:
            nbytes = self._bytes(stage)
            pieces = len(stage) if is_cut else max(1, math.ceil(nbytes / size))
            last = sum(backward[i] for i in stage)
            mine, end = self._gradients_of_stage(strategy, d, nbytes, pieces, busy, last)
            within, at_end = max(within, mine), at_end + end
        return within + at_end

    def _gradients_of_stage(
        self, strategy: Strategy, d: Degrees, nbytes: float, pieces: int, busy: float, last: float
    ) -> tuple[float, float]:
        """Returns the exposed seconds of one stage, during the step and after its last backward. A
        micro-batch takes ``busy`` seconds, the ``last`` backward a part of them."""
        stage, n, steps = strategy.zero_stage or 3, d.sharding, strategy.accumulate_steps
        low = 0.5 if strategy.amp else 1.0

        def takes(kind: str, sent: float, *axes: str) -> float:
            ranks = ranks_over(d, 0, axes)[0]
            return pieces * self.network.collective(kind, sent / pieces, ranks)

        def copies(sent: float) -> float:
            return pieces * self._copies(sent / pieces)

        def exposed(seconds: float, hidden_by: float) -> float:
            return max(seconds - hidden_by, seconds / pieces)  # nothing hides one of the pieces

        out = at_end = 0.0
        if n > 1:
            once = nbytes * (n - 1) / n
            gather, scatter = takes("all_gather", once * low, "sharding"), 0.0
            if stage == 1:
                at_end = takes("all_reduce", 2 * once, "sharding")
            else:
                at_end = scatter = takes("reduce_scatter", once, "sharding")
            if stage == 3:
                times = 2 - 1 / pieces  # the last piece is kept for the backward
                out += (steps - 1) * exposed(times * gather + scatter, busy)
                out += exposed(times * gather, busy)
                out += steps * times * copies(once * low)
            else:
                out += gather + (steps - 1) * exposed(scatter, last) + copies(once * low)
            out += copies(2 * once) if stage == 1 else steps * copies(once)
        replicas = d.dp * d.cp
        if replicas > 1:
            sent = 2 * nbytes / n * (replicas - 1) / replicas
            at_end += takes("all_reduce", sent, "dp", "cp")
            out += copies(sent)
        return out, exposed(at_end, last)

    def _memory(
        self, strategy: Strategy, d: Degrees, stage: Sequence[int], live: float, share: float,
        repeats: Sequence[bool],
    ) -> float:  # fmt: skip
        """Returns the bytes of a stage that holds ``live`` micro-batches."""
        held, layers, n = self._bytes(stage), self.probe.layers, d.sharding
        state = held * self.probe.held["optimizer state"] / max(self.probe.held["parameters"], 1)
        params = gradients = held
        if n > 1:
            zero, state = strategy.zero_stage or 3, state / n
            gathered = max((self._bytes([i]) for i in stage), default=0.0)
            whole = held if zero < 3 else min(held, gathered)
            params = held / n + whole * (0.5 if strategy.amp else 1.0)
            gradients = held if zero == 1 else held / n
        kept = again = 0.0
        for i in stage:
            copy = self._bytes([i]) / 2 if strategy.amp else 0.0  # the parameters in low precision
            mine = max(layers[i].kept - copy, 0.0) * share + (copy if n == 1 else 0.0)
            kept += layers[i].input * share if repeats[i] else mine
            again = max(again, mine if repeats[i] else 0.0)
            if i == len(layers) - 1:
                kept += self.probe.loss * share
        kept = kept * live + again
        if strategy.accumulate_steps == 1:  # gradients take the place of kept memory
            return params + state + max(kept, gradients)
        return params + state + gradients + kept


def _loads(
    stages: Stages, forward: Costs, backward: Costs, host: Sequence[float] | None = None
) -> tuple[float, float]:
    """Returns the largest and the mean load of a stage. ``forward`` and ``backward`` are of layers,
    ``host`` is of stages."""
    loads = [sum(forward[i] for i in stage) + sum(backward[i] for i in stage) for stage in stages]
    loads = [a + b for a, b in zip(loads, host or [0.0] * len(loads), strict=True)]
    return max(loads), sum(loads) / len(loads)


@cache
def _of_schedule(
    name: str, pp: int, steps: int, chunks: int, ratio: float
) -> tuple[float, list[int], float]:
    """Returns how long a stage is idle, in forwards and backwards of one micro-batch, the largest
    number of visits that each stage keeps memory for, and its actions for a micro-batch."""
    if pp == 1:
        return 0.0, [1], 2
    schedule = pipeline.named(name, pp, steps, chunks)
    bubble = schedule.bubble(1.0, max(ratio, 0.5))
    live = [schedule.peak(s) for s in range(pp)]
    return steps * bubble / (1 - bubble), live, len(schedule.orders[0]) / steps
