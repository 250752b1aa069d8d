"""``plan_strategy``: simulated strategies, sorted by the time of their step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from disttensor import arguments
from disttensor.parallel.strategy import Strategy
from disttensor.simulate import devices
from disttensor.simulate.devices import Device
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.network import Network
from disttensor.simulate.recorder import Values
from disttensor.simulate.report import Report
from disttensor.simulate.run import simulate
from disttensor.simulate.text import amount, seconds, table

_SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """A strategy, its ``report``, the ``reason`` why it lost, "" for the best, and whether it
    ``fits``: it runs, within the memory. The report is of rank 0 only, or None, where that was
    enough to know."""

    strategy: Strategy
    report: Report | None = field(repr=False)
    reason: str
    fits: bool


@dataclass(frozen=True)
class StrategyTable:
    """What ``plan_strategy`` has found: the ``candidates`` that were simulated as a whole, the
    fastest first, then those of which rank 0 was enough to know that they are slower, then those
    that do not fit. Prints the first ten."""

    world: int
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Strategy:
        """The strategy with the shortest step. Raises SimulationError where none fits."""
        first = self.candidates[0]
        if not first.fits:
            raise SimulationError(
                f"none of {len(self.candidates)} strategies runs on {self.world} ranks; of "
                f"{_named(first.strategy, self.world)}: {first.reason}"
            )
        return first.strategy

    def __str__(self) -> str:
        rows, reasons = [("strategy", "step", "peak memory")], ["why not"]
        for c in self.candidates[:_SHOWN]:
            report, step, peak = c.report, "", ""
            if report is not None:
                step = seconds(report.step_time) if c.fits and _is_whole(report) else ""
                peak = amount(report.fullest.peak_memory)
            rows.append((_named(c.strategy, self.world), step, peak))
            reasons.append(c.reason)
        figures = table(rows)
        lines = [
            f"{line:{len(figures[0])}}  {reason}".rstrip()
            for line, reason in zip(figures, reasons, strict=True)
        ]
        rest = len(self.candidates) - _SHOWN
        return "\n".join([*lines, *([f"and {rest} more"] if rest > 0 else [])])


def plan_strategy(
    build_with: Callable[[Strategy], Callable[[], Any]],
    world: int,
    candidates: Iterable[Strategy] | None = None,
    *,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008  (it is frozen)
    memory: float | None = None,
    values: Values = 0.0,
) -> StrategyTable:
    """Simulate a program under each of several strategies, and sort them by the time of a step.

    ``build_with(strategy)`` is what ``simulate`` takes as ``build``: it applies the strategy and
    returns ``step``. ``candidates``: strategies to compare; without it those of ``strategies``.
    ``memory``: bytes that a rank may use, those of the device without it.

    A strategy that the program refuses loses with that error. Of each, rank 0 is simulated first:
    if its memory does not fit, or it computes for longer than the best step so far takes, the other
    ranks are not.

    >>> def build_with(strategy):
    ...     model = torch.nn.Linear(8, 8)
    ...     strategy.apply(model, plan={"weight": {"tp": dt.Shard(0)}})
    ...     def step():
    ...         places = strategy.batch(sequence=None)
    ...         x = dt.shard_tensor(torch.ones(64, 8), strategy.stages()[0], places)
    ...         model(x).sum().backward()
    ...     return step
    >>> table = dt.plan_strategy(build_with, 4, [dt.Strategy(tp=4), dt.Strategy(tp=8)])
    >>> table.best.tp, [c.fits for c in table.candidates]
    (4, [True, False])
    """
    arguments.function("plan_strategy: build_with", build_with, "a function of a Strategy")
    arguments.whole("plan_strategy: world", world, 1, "a number of ranks")
    if memory is not None:
        arguments.positive("plan_strategy: memory", memory, "a number of bytes")
    given = strategies(world, network) if candidates is None else candidates
    expected = "a list of strategies"
    listed = arguments.listed("plan_strategy: candidates", given, expected)
    for one in listed:
        arguments.of_type("plan_strategy: candidates: entry", one, Strategy, expected)
    if not listed:
        raise ValueError("plan_strategy: candidates are empty: give one strategy at least")
    room = device.memory if memory is None else memory
    options: Any = {"device": device, "network": network, "values": values}
    tried: list[Candidate] = []
    best = float("inf")
    for strategy in listed:
        tried.append(_tried(build_with, world, strategy, room, best, options))
        if tried[-1].fits and not tried[-1].reason and tried[-1].report is not None:
            best = min(best, tried[-1].report.step_time)
    ahead = sorted((c for c in tried if c.fits and not c.reason), key=_time)
    slower = sorted((c for c in tried if c.fits and c.reason), key=_time)
    named = [Candidate(c.strategy, c.report, _why(c, ahead[0]), True) for c in ahead]
    return StrategyTable(world, (*named, *slower, *(c for c in tried if not c.fits)))


def strategies(world: int, network: Network) -> Iterator[Strategy]:
    """Every pp, every tp that lies within a node, and what is left of the world as dp, or as
    sharding with zero_stage 1 or 3. With stages there are 2 pp micro-batches."""
    for tp in (n for n in range(1, min(world, network.ranks_per_node) + 1) if world % n == 0):
        for pp in (n for n in range(1, world // tp + 1) if world // tp % n == 0):
            steps = 1 if pp == 1 else 2 * pp
            rest = world // tp // pp
            yield Strategy(pp=pp, tp=tp, dp=rest, accumulate_steps=steps)
            for stage in (1, 3) if rest > 1 else ():
                yield Strategy(
                    pp=pp, tp=tp, sharding=rest, zero_stage=stage, accumulate_steps=steps
                )


def _tried(
    build_with: Any, world: int, strategy: Strategy, room: float | None, best: float, options: Any
) -> Candidate:
    """The strategy with its report; the reason is for later where it was simulated as a whole."""
    report = None
    try:
        for ranks in ([0], None):
            report = simulate(lambda: build_with(strategy), world, ranks=ranks, **options)
            peak = report.fullest.peak_memory
            if room is not None and peak > room:
                return Candidate(strategy, report, f"{amount(peak - room)} over", False)
            busy = report.slowest.timeline.total("compute")
            if busy >= best:
                return Candidate(strategy, report, f"computes for {seconds(busy)}", True)
    except (ValueError, TypeError, SimulationError) as error:
        said = str(error).partition("\n")[0].partition(". ")[0]
        return Candidate(strategy, report, f"{type(error).__name__}: {said}", False)
    return Candidate(strategy, report, "", True)


def _time(c: Candidate) -> float:
    assert c.report is not None
    return max(c.report.step_time, c.report.slowest.timeline.total("compute"))


def _why(c: Candidate, best: Candidate) -> str:
    """What it does longer than the best one, of all that the most."""
    if c is best or c.report is None or best.report is None:
        return ""
    mine, its = _parts(c.report), _parts(best.report)
    part = max(mine, key=lambda name: mine[name] - its[name])
    return f"{part} {mine[part] / c.report.step_time:.0%}"


def _is_whole(report: Report) -> bool:
    """Is it of all ranks?"""
    return sum(len(k.ranks) for k in report.kinds) == report.world


def _parts(report: Report) -> dict[str, float]:
    """Seconds of a step, the mean of all ranks."""
    bubble, waits = report.bubble, report.exposed_communication
    shares = {"bubble": bubble, "collectives": waits, "computes": 1 - bubble - waits}
    return {name: share * report.step_time for name, share in shares.items()}


def _named(strategy: Strategy, world: int) -> str:
    try:
        found = strategy.degrees(world)._asdict()
    except ValueError:
        found = {a: n for a in ("pp", "dp", "sharding", "cp", "tp") if (n := getattr(strategy, a))}
    words = [f"{axis}={n}" for axis, n in found.items() if n > 1] or ["one rank"]
    if strategy.zero_stage and found.get("sharding", 1) > 1:
        words.append(f"zero={strategy.zero_stage}")
    if strategy.accumulate_steps > 1:
        words.append(f"accumulate={strategy.accumulate_steps}")
    return " ".join(words)
