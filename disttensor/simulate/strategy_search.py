"""All strategies of a world: estimated, those that look best simulated, the others not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from disttensor.errors import SimulationError
from disttensor.parallel.strategy import Strategy
from disttensor.simulate.candidates import Program, shape, strategies
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.estimate import Estimate, Estimator
from disttensor.simulate.probe import Probe, probe
from disttensor.simulate.recorder import Values
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_build
from disttensor.simulate.strategy_table import Candidate, named, step_time
from disttensor.simulate.text import amount, seconds

_UNSURE = 0.96  # simulated over estimated time: strategies of one program differ by no more
_EXACT = 0.9  # an estimate of the memory is not above the peak by more than this
_FULL = 0.8  # of the memory: rank 0 is looked at first where an estimate says more
REFUSES = (ValueError, TypeError, SimulationError)


@dataclass
class Search:
    """``room``: bytes that a rank may use, None: not known. ``most``: strategies are simulated as a
    whole. ``say`` hears of each step."""

    build_with: Callable[[Strategy], Callable[[], Any]]
    world: int
    device: Device
    network: Network
    values: Values
    room: float | None
    like: Strategy
    most: int
    say: Callable[[str], None]
    best: float = float("inf")
    simulated: int = 0
    full: list[Candidate] = field(default_factory=list)  # that did not fit, though estimated to

    # Simulations ----------------------------------------------------------------------------------

    def simulate(self, strategy: Strategy, estimate: Estimate | None = None) -> Candidate:
        """Rank 0, and all ranks where that says that it might be the best."""
        self.say(f"simulating {named(strategy, self.world)}")
        report, room = None, self.room
        sure = estimate is not None and (room is None or estimate.memory < _FULL * room)
        try:
            for ranks in (None,) if sure else ([0], None):
                report = simulate_program(
                    of_build(lambda: self.build_with(strategy)), self.world, ranks=ranks,
                    device=self.device, network=self.network, values=self.values,
                )  # fmt: skip
                peak = report.fullest.peak_memory
                if room is not None and peak > room:
                    over = f"{amount(peak - room)} over"
                    return Candidate(strategy, report, over, False, estimate)
                busy = report.slowest.timeline.total("compute")
                if ranks and busy >= self.best:
                    late = f"computes for {seconds(busy)}"
                    return Candidate(strategy, report, late, True, estimate)
        except REFUSES as error:
            return Candidate(strategy, report, refusal(error), False, estimate)
        assert report is not None
        self.simulated += 1
        self.best = min(self.best, step_time(report))
        return Candidate(strategy, report, "", True, estimate)

    # All strategies -------------------------------------------------------------------------------

    def all(self) -> list[Candidate]:
        """Every strategy of the world, of which the most promising are simulated."""
        estimated = list(self._estimated())
        ready = [c for c in estimated if not c.reason]
        ready.sort(key=_order)
        firsts = list({shape(c.strategy): c for c in reversed(ready)}.values())
        done = dict[int, Candidate]()
        faster = dict[Any, float]()  # simulated over estimated time, of a shape
        for group, until in ((firsts[::-1], self.most // 2), (ready, self.most)):
            for c in group:
                if self.simulated >= max(until, 1) or id(c) in done:
                    continue
                key = shape(c.strategy)
                bias = faster.get(key, min(faster.values(), default=1.0))
                if c.step_time * bias * _UNSURE >= self.best or self._too_full(c):
                    continue
                made = self.simulate(c.strategy, c.estimate)
                done[id(c)] = made
                if made.simulated and made.fits:
                    ratio = made.step_time / c.step_time
                    faster[key] = min(faster.get(key, ratio), ratio)
                elif not made.fits:
                    self.full.append(made)
        return [done.get(id(c), c) for c in estimated]

    def _too_full(self, c: Candidate) -> bool:
        """Is a like one, that is estimated to need no more, too large?"""
        return c.estimate is not None and any(
            shape(f.strategy) == shape(c.strategy)
            and f.estimate is not None
            and f.report is not None
            and f.estimate.memory <= c.estimate.memory
            for f in self.full
        )

    def _estimated(self) -> Iterator[Candidate]:
        """Each with an estimate, or with the reason why it is out."""
        probes = {1: self._probe(replace(self.like, tp=1, cp=1, pp=1))}
        first = probes[1]
        program = Program() if isinstance(first, str) else Program.of(first)
        known: dict[int, Estimator | str] = {}
        for strategy, reason in strategies(self.world, self.network, program, self.like):
            if reason:
                yield Candidate(strategy, None, reason, False)
                continue
            tp = strategy.tp or 1
            if tp not in known:
                found = probes.get(tp) or self._probe(replace(self.like, tp=tp, cp=1, pp=1))
                known[tp] = found if isinstance(found, str) else Estimator(
                    found, self.world, self.device, self.network
                )  # fmt: skip
            yield self._estimate(strategy, known[tp], program)

    def _estimate(self, strategy: Strategy, by: Estimator | str, program: Program) -> Candidate:
        if isinstance(by, str):
            return Candidate(strategy, None, by, False)
        if not by.probe.layers:
            return Candidate(strategy, None, "", True)
        again = _meant(strategy.recompute, program.layers)
        try:
            estimate = by(strategy, again)
        except ValueError as error:
            return Candidate(strategy, None, refusal(error), False)
        if self.room is not None and estimate.memory * _EXACT > self.room:
            over = f"about {amount(estimate.memory - self.room)} over"
            return Candidate(strategy, None, over, False, estimate)
        return Candidate(strategy, None, "", True, estimate)

    def _probe(self, strategy: Strategy) -> Probe | str:
        """As many replicas as there is room for: memory does not count here."""
        strategy = replace(
            strategy, dp=None, sharding=1, zero_stage=None, accumulate_steps=1, schedule="1f1b"
        )
        self.say(f"looking at {named(strategy, self.world)}")
        try:
            return probe(
                self.build_with, strategy, self.world, self.values, self.network.ranks_per_node,
                self.device.backend,
            )  # fmt: skip
        except REFUSES as error:
            return refusal(error)


def _order(c: Candidate) -> tuple[float, float]:
    """What computes less comes first, of those that wait for as long as the other computes."""
    return c.step_time, c.estimate.parts["computes"] if c.estimate else 0.0


def refusal(error: Exception) -> str:
    """The first sentence."""
    said = str(error).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {said}"


def _meant(patterns: Any, layers: tuple[str, ...]) -> frozenset[str]:
    """The layers that these names and globs of whole layers mean."""
    ways = {p.removesuffix("*") for p in patterns if p.endswith(".*")}
    return frozenset(n for n in layers if n in patterns or f"{n.rpartition('.')[0]}." in ways)
