"""The result of ``plan_strategy``: strategies with their costs, and why all but one lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from disttensor.errors import SimulationError
from disttensor.parallel.strategy import Strategy
from disttensor.simulate.estimate import Estimate
from disttensor.simulate.report import Report
from disttensor.simulate.text import amount, seconds, table

_SHOWN = 10
_ALIKE = 0.01  # of a step
_UNSURE = 0.02  # of a step: if times differ by less, it is not known which strategy is faster
_DEFAULT = Strategy().schedule


@dataclass(frozen=True)
class Candidate:
    """A strategy.

    Attributes:
        report: its simulation; of rank 0 only, or None, if that or the estimate was enough
        reason: why the strategy lost; "" for the best
        fits: whether it runs, within the memory
        estimate: its estimated time and memory
    """

    strategy: Strategy
    report: Report | None = field(repr=False)
    reason: str
    fits: bool
    estimate: Estimate | None = field(default=None, repr=False)

    @property
    def simulated(self) -> bool:
        """Whether all ranks were simulated."""
        report = self.report
        return report is not None and sum(len(k.ranks) for k in report.kinds) == report.world

    @property
    def step_time(self) -> float:
        """The seconds of a step, simulated (of rank 0 at least) or estimated."""
        if self.report is not None:
            return self.report.step_time
        return self.estimate.seconds if self.estimate else float("inf")


@dataclass(frozen=True)
class StrategyTable:
    """The result of ``plan_strategy``.

    ``candidates`` are sorted: strategies that were simulated on all ranks, the fastest first;
    slower ones, of which an estimate or rank 0 was enough; strategies that do not fit. Of several
    strategies with the same time within 2 %, one with the default schedule comes first, because the
    costs of other schedules (backwards in parts, more visits) are known less well.

    ``print(table)`` shows the first ten. A time with ~ is estimated.
    """

    world: int
    candidates: tuple[Candidate, ...]

    @classmethod
    def of(cls, world: int, tried: list[Candidate]) -> StrategyTable:
        by_time = sorted((c for c in tried if c.fits), key=lambda c: c.step_time)
        whole = [c for c in by_time if c.simulated and not c.reason]
        slower = [c for c in by_time if not c.simulated or c.reason]
        if whole:
            alike = [c for c in whole if c.step_time <= (1 + _UNSURE) * whole[0].step_time]
            first = next((c for c in alike if c.strategy.schedule == _DEFAULT), whole[0])
            rest = [replace(c, reason=_why(c, first)) for c in whole if c is not first]
            whole = [first, *rest]
            slower = [c if c.reason else replace(c, reason=_why(c, first)) for c in slower]
        return cls(world, (*whole, *slower, *(c for c in tried if not c.fits)))

    @property
    def best(self) -> Strategy:
        """The strategy of the first candidate. Raises SimulationError if none fits."""
        first = self.candidates[0]
        if not first.fits:
            raise SimulationError(
                f"none of {len(self.candidates)} strategies runs on {self.world} ranks; of "
                f"{named(first.strategy, self.world)}: {first.reason}"
            )
        return first.strategy

    def __str__(self) -> str:
        rows = [("strategy", "step", "peak memory", "why not")]
        for c in self.candidates[:_SHOWN]:
            step = peak = ""
            if c.report is not None:
                step = seconds(c.step_time) if c.fits and c.simulated else ""
                peak = amount(c.report.fullest.peak_memory)
            elif c.estimate is not None:
                step = f"~{seconds(c.estimate.seconds)}" if c.fits else ""
                peak = f"~{amount(c.estimate.memory)}"
            rows.append((named(c.strategy, self.world), step, peak, c.reason))
        rest = len(self.candidates) - _SHOWN
        return "\n".join([*table(rows, (0, 3)), *([f"and {rest:,} more"] if rest > 0 else [])])


def _why(c: Candidate, first: Candidate) -> str:
    """Returns the part of a step that ``c`` spends more time on than ``first``, of all parts the
    one with the largest difference. Both are compared by their simulations, or their estimates."""
    if c.simulated and c.step_time < first.step_time:
        return "as fast, by another schedule"
    if c.report is not None and first.report is not None:
        mine, its = _parts(c.report), _parts(first.report)
    elif c.estimate is not None and first.estimate is not None:
        mine, its = c.estimate.parts, first.estimate.parts
    else:
        return "not simulated"
    part = max(mine, key=lambda name: mine[name] - its[name])
    whole = sum(mine.values())
    if c.report is None and mine[part] - its[part] < _ALIKE * whole:
        return "about as fast, not simulated"
    return f"{part} {mine[part] / whole:.0%}" if whole else ""


def _parts(report: Report) -> Mapping[str, float]:
    """Returns the seconds of a step by part, the mean of all ranks."""
    whole = report.step_time
    waits, bubble = (part * whole for part in (report.exposed_communication, report.bubble))
    return {"computes": whole - bubble - waits, "collectives": waits, "bubble": bubble}


def named(strategy: Strategy, world: int) -> str:
    """Returns the options in which a strategy differs from a single rank, as text."""
    try:
        found = strategy.degrees(world)._asdict()
    except ValueError:
        found = {a: n for a in ("pp", "dp", "sharding", "cp", "tp") if (n := getattr(strategy, a))}
    size = getattr(strategy.segments, "megabytes", None)
    words: list[Any] = [
        *([f"{axis}={n}" for axis, n in found.items() if n > 1] or ["one rank"]),
        strategy.zero_stage and found.get("sharding", 1) > 1 and f"zero={strategy.zero_stage}",
        strategy.accumulate_steps > 1 and f"accumulate={strategy.accumulate_steps}",
        found.get("pp", 1) > 1 and strategy.schedule != _DEFAULT and strategy.schedule,
        strategy.recompute and f"recompute={','.join(strategy.recompute)}",
        size is not None and f"segments={size:g}MiB",
    ]
    return " ".join(word for word in words if word)
