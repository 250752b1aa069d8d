"""What ``plan_strategy`` gives: strategies with what they cost, and why all but one lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from disttensor.errors import SimulationError
from disttensor.parallel.strategy import Strategy
from disttensor.simulate.estimate import Estimate
from disttensor.simulate.report import Report
from disttensor.simulate.text import amount, seconds, table

_SHOWN = 10
_ALIKE = 0.01  # of a step
_UNSURE = 0.02  # of a step: nearer to each other, times do not say which is faster
_PLAIN = Strategy().schedule


@dataclass(frozen=True)
class Candidate:
    """A strategy, its ``report``, the ``reason`` why it lost, "" for the best, and whether it
    ``fits``: it runs, within the memory. The report is of rank 0 only, or None, where that, or the
    ``estimate``, was enough to know."""

    strategy: Strategy
    report: Report | None = field(repr=False)
    reason: str
    fits: bool
    estimate: Estimate | None = field(default=None, repr=False)

    @property
    def simulated(self) -> bool:
        """As a whole, that is, on all ranks."""
        report = self.report
        return report is not None and sum(len(k.ranks) for k in report.kinds) == report.world

    @property
    def step_time(self) -> float:
        """Seconds of a step: simulated, of rank 0 at least, or estimated."""
        if self.report is not None:
            return step_time(self.report)
        return self.estimate.seconds if self.estimate else float("inf")


@dataclass(frozen=True)
class StrategyTable:
    """What ``plan_strategy`` has found: the ``candidates`` that were simulated as a whole, the
    fastest first, then those of which an estimate, or rank 0, was enough to know that they are
    slower, then those that do not fit. Of several that take the same time within 2 %, one with the
    default schedule is first: what it costs to run a backward in parts, or in more visits, is known
    least. Prints the first ten; a time with ~ is estimated."""

    world: int
    candidates: tuple[Candidate, ...]

    @classmethod
    def of(cls, world: int, tried: list[Candidate]) -> StrategyTable:
        whole = sorted((c for c in tried if c.fits and c.simulated and not c.reason), key=_time)
        known = {id(c) for c in whole}
        slower = sorted((c for c in tried if c.fits and id(c) not in known), key=_time)
        if whole:
            first = _plainest(whole)
            rest = [c for c in whole if c is not first]
            whole = [first, *(replace(c, reason=_why(c, first)) for c in rest)]
            slower = [c if c.reason else replace(c, reason=_why(c, first)) for c in slower]
        return cls(world, (*whole, *slower, *(c for c in tried if not c.fits)))

    @property
    def best(self) -> Strategy:
        """That of the first candidate. Raises SimulationError where none fits."""
        first = self.candidates[0]
        if not first.fits:
            raise SimulationError(
                f"none of {len(self.candidates)} strategies runs on {self.world} ranks; of "
                f"{named(first.strategy, self.world)}: {first.reason}"
            )
        return first.strategy

    def __str__(self) -> str:
        rows, reasons = [("strategy", "step", "peak memory")], ["why not"]
        for c in self.candidates[:_SHOWN]:
            step = peak = ""
            if c.report is not None:
                step = seconds(c.step_time) if c.fits and c.simulated else ""
                peak = amount(c.report.fullest.peak_memory)
            elif c.estimate is not None:
                step = f"~{seconds(c.estimate.seconds)}" if c.fits else ""
                peak = f"~{amount(c.estimate.memory)}"
            rows.append((named(c.strategy, self.world), step, peak))
            reasons.append(c.reason)
        figures = table(rows)
        lines = [
            f"{line:{len(figures[0])}}  {reason}".rstrip()
            for line, reason in zip(figures, reasons, strict=True)
        ]
        rest = len(self.candidates) - _SHOWN
        return "\n".join([*lines, *([f"and {rest:,} more"] if rest > 0 else [])])


def _time(c: Candidate) -> float:
    return c.step_time


def _plainest(whole: list[Candidate]) -> Candidate:
    """Of those that are as fast as the first, as far as is known."""
    alike = [c for c in whole if c.step_time <= (1 + _UNSURE) * whole[0].step_time]
    return next((c for c in alike if c.strategy.schedule == _PLAIN), whole[0])


def _why(c: Candidate, first: Candidate) -> str:
    """What it does longer than the best one, of all that the most: both as they were simulated, or
    as they were estimated."""
    if c.simulated and c.step_time < first.step_time:
        return "as fast, by another schedule"
    estimates = c.estimate, first.estimate
    if c.report is not None and first.report is not None:
        mine, its = _parts(c.report), _parts(first.report)
    elif estimates[0] is not None and estimates[1] is not None:
        mine, its = estimates[0].parts, estimates[1].parts
    else:
        return "not simulated"
    part = max(mine, key=lambda name: mine[name] - its[name])
    whole = sum(mine.values())
    if c.report is None and mine[part] - its[part] < _ALIKE * whole:
        return "about as fast, not simulated"
    return f"{part} {mine[part] / whole:.0%}" if whole else ""


def step_time(report: Report) -> float:
    """Seconds of a step; of a report of rank 0 alone, about those that it computes for."""
    return report.step_time


def _parts(report: Report) -> Mapping[str, float]:
    """Seconds of a step, the mean of all ranks."""
    whole = report.step_time
    waits, bubble = (part * whole for part in (report.exposed_communication, report.bubble))
    return {"computes": whole - bubble - waits, "collectives": waits, "bubble": bubble}


def named(strategy: Strategy, world: int) -> str:
    """What differs from one rank that does all by itself."""
    try:
        found = strategy.degrees(world)._asdict()
    except ValueError:
        found = {a: n for a in ("pp", "dp", "sharding", "cp", "tp") if (n := getattr(strategy, a))}
    words = [f"{axis}={n}" for axis, n in found.items() if n > 1] or ["one rank"]
    if strategy.zero_stage and found.get("sharding", 1) > 1:
        words.append(f"zero={strategy.zero_stage}")
    if strategy.accumulate_steps > 1:
        words.append(f"accumulate={strategy.accumulate_steps}")
    if found.get("pp", 1) > 1 and strategy.schedule != "1f1b":
        words.append(strategy.schedule)
    if strategy.recompute:
        words.append(f"recompute={','.join(strategy.recompute)}")
    size = getattr(strategy.segments, "megabytes", None)
    if size is not None:
        words.append(f"segments={size:g}MiB")
    return " ".join(words)
