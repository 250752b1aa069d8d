"""What a simulated step costs: for each kind of rank, and all of them together."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from disttensor.simulate import chrome_trace
from disttensor.simulate.devices import Device
from disttensor.simulate.findings import findings
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.network import Network
from disttensor.simulate.text import amount, quantity, seconds, table


@dataclass(frozen=True, eq=False)
class Report:
    """What ``dt.simulate`` has found: one Kind for all ranks that do the same. Prints as tables.
    ``said``: the warnings of the program itself, such as those of fallbacks that gather."""

    world: int
    kinds: list[Kind]
    device: Device
    network: Network
    said: list[str]

    # All ranks together ---------------------------------------------------------------------------

    @property
    def step_time(self) -> float:
        """Seconds from the begin of the step until the last rank has ended."""
        return max(k.timeline.end for k in self.kinds)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time, 0 to 1, in which they wait for another stage, or have
        nothing left to do."""
        idle = self._sum(lambda k: k.timeline.total("wait for a stage") - k.timeline.end)
        return idle / self._time + 1 if self._time else 0.0

    @property
    def exposed_communication(self) -> float:
        """The part of all ranks' time, 0 to 1, in which they wait for a collective."""
        waits = self._sum(lambda k: k.timeline.total("wait for ranks"))
        return waits / self._time if self._time else 0.0

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation, 0 to 1: three times the FLOPs of the forwards (a backward does
        twice those of its forward), over what the devices could do in this time. Chowdhery et al.,
        "PaLM", 2022, appendix B."""
        by: Counter[str] = Counter()
        for k in self.kinds:
            for dtype, n in k.flops_by("dtype").items():
                by[dtype] += n * len(k.ranks)
        peaks = {str(dtype): peak for dtype, peak in self.device.peak.items()}
        if not by or not self._time:
            return 0.0
        model = 3 * self._sum(lambda k: k.flops_by("phase").get("forward", 0))
        return model / (self._time * peaks[by.most_common(1)[0][0]])

    @property
    def flops(self) -> int:
        """Floating-point operations of all ranks together."""
        return int(self._sum(lambda k: k.flops))

    @cached_property
    def warnings(self) -> list[str]:
        """What is worth a change, each with what to do instead."""
        return [*self.said, *findings(self.kinds, self.device, self.network)]

    def _sum(self, of: Any) -> float:
        return sum(of(k) * len(k.ranks) for k in self.kinds)

    @property
    def _time(self) -> float:
        return self.step_time * sum(len(k.ranks) for k in self.kinds)

    # Some of them ---------------------------------------------------------------------------------

    def kind_of(self, rank: int) -> Kind:
        """The kind of a rank. Raises ValueError for one that was not simulated."""
        found = next((k for k in self.kinds if rank in k.ranks), None)
        if found is None:
            there = names_of(sorted(r for k in self.kinds for r in k.ranks))
            raise ValueError(
                f"rank {rank} was not simulated: the report is of ranks {there} of {self.world}"
            )
        return found

    @property
    def fullest(self) -> Kind:
        """The kind with the highest peak of memory."""
        return max(self.kinds, key=lambda k: k.peak_memory)

    @property
    def slowest(self) -> Kind:
        """The kind that computes longest."""
        return max(self.kinds, key=lambda k: k.timeline.total("compute"))

    # As files and text ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain data: bytes, counts, FLOPs, seconds."""
        return {
            "world": self.world,
            "device": self.device.name,
            "step_time": self.step_time,
            "bubble": self.bubble,
            "exposed_communication": self.exposed_communication,
            "utilisation": self.utilisation,
            "flops": self.flops,
            "kinds": [k.as_dict(self.network) for k in self.kinds],
            "warnings": self.warnings,
        }

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Writes all figures to ``path``."""
        file = Path(path)
        file.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")
        return file

    def to_chrome_trace(self, path: str | PathLike[str]) -> Path:
        """Writes the time line to ``path``, for Perfetto and chrome://tracing: a process for each
        kind of rank, with threads for what it computes, sends and waits for."""
        file = Path(path)
        named = [(f"ranks {names_of(k.ranks)}", k.rank, k.timeline) for k in self.kinds]
        file.write_text(json.dumps(chrome_trace.trace(named)), encoding="utf-8")
        return file

    def __str__(self) -> str:
        head = (
            f"{self.world:,} ranks of {len(self.kinds)} kinds on {self.device.name}: a step of "
            f"{seconds(self.step_time)}, {quantity(self.flops)}FLOP, utilisation "
            f"{self.utilisation:.1%}, bubble {self.bubble:.1%}, waiting for collectives "
            f"{self.exposed_communication:.1%}"
        )
        rows = [("ranks", "", "FLOP", "computes", "waits", "peak memory", "collectives", "sent",
                 "messages", "sent", "between nodes")]  # fmt: skip
        for k in self.kinds:
            volume, line = k.volume(), k.timeline
            messages = volume.pop("stages", (0, 0))
            rows.append((
                names_of(k.ranks), f"{len(k.ranks):,}", quantity(k.flops),
                seconds(line.total("compute")),
                seconds(line.total("wait for ranks") + line.total("wait for a stage")),
                amount(k.peak_memory), f"{sum(n for n, _ in volume.values()):,}",
                amount(sum(b for _, b in volume.values())), f"{messages[0]:,}",
                amount(messages[1]), amount(k.between_nodes(self.network)),
            ))  # fmt: skip
        full = self.fullest
        held = [(f"  {name}", amount(n)) for name, n in full.memory.at_peak.items() if n]
        sent = [
            (names_of(k.ranks), axis, f"{n:,}", f"{b:,}")
            for k in self.kinds
            for axis, (n, b) in k.volume().items()
        ]
        return "\n".join([
            head, "", *table(rows), "",
            f"memory of ranks {names_of(full.ranks)} at their peak, at {full.memory.where}:",
            *table(held or [("  nothing", "")]), "", "sent by one rank:",
            *table([("ranks", "axis", "number", "bytes"), *sent]),
            *(f"\nwarning: {w}" for w in self.warnings),
        ])  # fmt: skip
