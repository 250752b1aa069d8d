"""``plan_strategy``: simulates strategies, and sorts them by the time of their step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from disttensor.checks import check_callable, check_int, check_positive, check_sequence, check_type
from disttensor.parallel.strategy import Strategy
from disttensor.progress import bar
from disttensor.simulate import devices
from disttensor.simulate import layer_times as layer_times  # for balance="time"
from disttensor.simulate.candidates import ProgramShape, strategies
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.estimate import Estimate, Estimator
from disttensor.simulate.probe import probe
from disttensor.simulate.recorder import Values
from disttensor.simulate.run import check_setting, simulate_program
from disttensor.simulate.run_rank import of_build
from disttensor.simulate.strategy_table import Candidate as Candidate
from disttensor.simulate.strategy_table import StrategyTable, named
from disttensor.simulate.text import amount, seconds

_UNSURE = 0.96  # simulated over estimated time: strategies of one program differ by no more
_EXACT = 0.9  # of estimated memory: the real peak is not lower
_FULL = 0.8  # of the memory: rank 0 runs first if the estimate is above this


def plan_strategy(
    build_with: Callable[[Strategy], Callable[[], Any]],
    world: int,
    candidates: Iterable[Strategy] | None = None,
    *,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008  (it is frozen)
    memory: float | None = None,
    values: Values = 0.0,
    like: Strategy = Strategy(),  # noqa: B008
    most: int = 8,
    progress: Callable[[str], Any] | None = None,
) -> StrategyTable:
    """Simulates a program under several strategies, and sorts them by the time of a step.

    Rank 0 runs first where memory may not suffice, and for given candidates: if it does not fit, or
    computes for longer than the best step so far, the other ranks do not run. A strategy that the
    program refuses loses with the error.

    Args:
        build_with: as ``build`` of ``simulate``, with a strategy as its argument: applies the
            strategy and returns ``step``.
        world: the number of ranks.
        candidates: strategies to compare. Default: all degrees of pp, dp, sharding, cp, and of tp
            within a node; each with all zero stages, numbers of micro-batches and schedules, with
            larger segments, and with recomputation of the blocks or of all layers. Their time and
            memory are estimated from rank 0 without stages, for each tp; the best are simulated.
        device: the costs of kernels.
        network: the costs of collectives and messages.
        memory: bytes that a rank may use. Default: the memory of the device.
        values: the result of reading data, see ``simulate``.
        like: the other options of all strategies, as ``dt.Strategy(amp="bf16")``.
        most: how many strategies to simulate on all ranks, if ``candidates`` is not given.
        progress: is called with a line of text for each simulation. Default: a bar shows it.

    >>> def build_with(strategy):
    ...     model = torch.nn.Linear(8, 8)
    ...     strategy.apply(model, plan={"weight": {"tp": dt.Shard(0)}})
    ...     def step():
    ...         places = strategy.batch(sequence=None)
    ...         x = dt.shard_tensor(torch.ones(64, 8), strategy.stages()[0], places)
    ...         model(x).sum().backward()
    ...     return step
    >>> table = dt.simulate.plan_strategy(build_with, 4, [dt.Strategy(tp=4), dt.Strategy(tp=8)])
    >>> table.best.tp, [c.fits for c in table.candidates]
    (4, [True, False])
    """
    check_callable("plan_strategy: build_with", build_with, "a function of a Strategy")
    check_setting("plan_strategy", world, device, network, values)
    check_type("plan_strategy: like", like, Strategy, "a Strategy")
    check_int("plan_strategy: most", most, 1, "a number of strategies")
    if memory is not None:
        check_positive("plan_strategy: memory", memory, "a number of bytes")
    if progress is not None:
        check_callable("plan_strategy: progress", progress, "a function of a line")
    memory_limit = device.memory if memory is None else memory
    expected = "a list of strategies"
    listed = check_sequence("plan_strategy: candidates", candidates or (), expected)
    for one in listed:
        check_type("plan_strategy: candidates: entry", one, Strategy, expected)
    if candidates is not None and not listed:
        raise ValueError("plan_strategy: candidates are empty: give one strategy at least")
    with bar("planning", len(listed) or None, "simulations") as advance:
        search = Search(
            build_with, world, device, network, values, memory_limit, like, most,
            progress or (lambda line: advance(note=line)),
        )  # fmt: skip
        found = [search.simulate(one) for one in listed] if listed else search.all()
    return StrategyTable.of(world, found)


@dataclass
class Search:
    """A search for the fastest strategy; see ``plan_strategy``. ``memory_limit``: bytes that a rank
    may use, None if not known."""

    build_with: Callable[[Strategy], Callable[[], Any]]
    world: int
    device: Device
    network: Network
    values: Values
    memory_limit: float | None
    like: Strategy
    most: int
    say: Callable[[str], None]
    best: float = float("inf")
    simulated: int = 0
    too_large: list[Candidate] = field(default_factory=list)  # although estimated to fit

    def simulate(self, strategy: Strategy, estimate: Estimate | None = None) -> Candidate:
        """Simulates rank 0, and all ranks if the strategy may be the best."""
        self.say(f"simulating {named(strategy, self.world)}")
        report, memory_limit = None, self.memory_limit
        will_fit = estimate is not None and (
            memory_limit is None or estimate.memory < _FULL * memory_limit
        )
        try:
            for ranks in (None,) if will_fit else ([0], None):
                report = simulate_program(
                    of_build(lambda: self.build_with(strategy)), self.world, ranks=ranks,
                    device=self.device, network=self.network, values=self.values,
                )  # fmt: skip
                peak = report.fullest.peak_memory
                if memory_limit is not None and peak > memory_limit:
                    over = f"{amount(peak - memory_limit)} over"
                    return Candidate(strategy, report, over, False, estimate)
                busy = report.slowest.timeline.total("compute")
                if ranks and busy >= self.best:
                    late = f"computes for {seconds(busy)}"
                    return Candidate(strategy, report, late, True, estimate)
        except Exception as error:
            return Candidate(strategy, report, _refusal(error), False, estimate)
        assert report is not None
        self.simulated += 1
        self.best = min(self.best, report.step_time)
        return Candidate(strategy, report, "", True, estimate)

    def all(self) -> list[Candidate]:
        """Estimates every strategy of the world, and simulates the most promising ones: first the
        best of each shape, then the others."""
        estimated = list(self._estimated())
        ready = sorted((c for c in estimated if not c.reason), key=_order)
        firsts = list({_shape(c): c for c in reversed(ready)}.values())[::-1]
        done = dict[int, Candidate]()
        ratios = dict[Any, float]()  # simulated over estimated time, by shape
        limits = [*((c, self.most // 2) for c in firsts), *((c, self.most) for c in ready)]
        for c, limit in limits:
            ratio = ratios.get(_shape(c), min(ratios.values(), default=1.0))
            if (
                self.simulated >= max(limit, 1) or id(c) in done or self._too_large(c)
                or c.step_time * ratio * _UNSURE >= self.best
            ):  # fmt: skip
                continue
            made = done[id(c)] = self.simulate(c.strategy, c.estimate)
            if made.simulated and made.fits:
                ratio = made.step_time / c.step_time
                ratios[_shape(c)] = min(ratios.get(_shape(c), ratio), ratio)
            elif not made.fits and made.report is not None:
                self.too_large.append(made)
        return [done.get(id(c), c) for c in estimated]

    def _too_large(self, c: Candidate) -> bool:
        """Returns True if a strategy of the same shape, estimated to need no more, is too large."""
        return c.estimate is not None and any(
            _shape(f) == _shape(c) and f.estimate and f.estimate.memory <= c.estimate.memory
            for f in self.too_large
        )

    def _estimated(self) -> Iterator[Candidate]:
        """Yields each strategy with an estimate, or with the reason why it is out."""
        estimator = cache(self.estimator)
        first = estimator(1)
        program = ProgramShape() if isinstance(first, str) else ProgramShape.of(first.probe)
        for strategy, reason in strategies(self.world, self.network, program, self.like):
            by = reason or estimator(strategy.tp or 1)
            if isinstance(by, str):
                yield Candidate(strategy, None, by, False)
            else:
                yield self._estimate(strategy, by, program)

    def _estimate(self, strategy: Strategy, by: Estimator, program: ProgramShape) -> Candidate:
        if not by.probe.layers:
            return Candidate(strategy, None, "", True)
        try:
            estimate = by(strategy, _matching(strategy.recompute, program.layers))
        except ValueError as error:
            return Candidate(strategy, None, _refusal(error), False)
        if self.memory_limit is not None and estimate.memory * _EXACT > self.memory_limit:
            over = f"about {amount(estimate.memory - self.memory_limit)} over"
            return Candidate(strategy, None, over, False, estimate)
        return Candidate(strategy, None, "", True, estimate)

    def estimator(self, tp: int) -> Estimator | str:
        """Returns the estimator of strategies with this tp, from a run with only replicas, or the
        error of this run as text."""
        strategy = replace(
            self.like, tp=tp, cp=1, pp=1, dp=None, sharding=1, zero_stage=None,
            accumulate_steps=1, schedule="1f1b",
        )  # fmt: skip
        self.say(f"looking at {named(strategy, self.world)}")
        try:
            found = probe(
                self.build_with, strategy, self.world, self.values, self.network.ranks_per_node,
                self.device,
            )  # fmt: skip
        except Exception as error:
            return _refusal(error)
        return Estimator(found, self.world, self.device, self.network)


def _order(c: Candidate) -> tuple[float, float]:
    """Sorts by time; of equal times the strategy that computes less comes first."""
    return c.step_time, c.estimate.parts["computes"] if c.estimate else 0.0


def _shape(c: Candidate) -> tuple[Any, ...]:
    """Returns the degrees in which unlike strategies differ."""
    return c.strategy.pp, c.strategy.tp, c.strategy.cp


def _refusal(error: Exception) -> str:
    """Returns the first sentence of an error."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"


def _matching(patterns: Iterable[str], layers: tuple[str, ...]) -> frozenset[str]:
    """Returns the layers that these names and globs, as ``blocks.*``, match."""
    ways = {p.removesuffix("*") for p in patterns if p.endswith(".*")}
    return frozenset(n for n in layers if n in patterns or f"{n.rpartition('.')[0]}." in ways)
