"""The result of ``simulate``: the figures of each kind of rank, and of all ranks together."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from disttensor.checks import argument_error, check_int
from disttensor.drawing.chrome_trace import write_chrome_trace
from disttensor.drawing.svg import write_svg
from disttensor.simulate import layer_shares, pictures
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.findings import findings
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.measured import Measured
from disttensor.simulate.page import page
from disttensor.simulate.text import amount, quantity, seconds, table
from disttensor.simulate.timeline import timelines

_FILES = 8  # of a folder: more are one line of text
_LANES = ("compute", "communication", "wait for ranks", "wait for a stage")


@dataclass(frozen=True, eq=False)
class Report:
    """The result of ``simulate``: one Kind for all ranks that do the same. Prints as tables.

    ``said``: the warnings of the program itself, for example of a fallback that gathers.
    ``updates``: how often each class of optimizer updates in the step. ``files``: the bytes, and
    the ranks, of each file that the program writes up to the end of the step. The simulation keeps
    none of them. ``measured``: the times in place of those by ``device``.
    """

    world: int
    kinds: list[Kind]
    device: Device
    network: Network
    said: list[str]
    updates: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    measured: Measured | None = None

    # All ranks together ---------------------------------------------------------------------------

    @property
    def step_time(self) -> float:
        """Seconds from the begin of the step until the last rank has ended."""
        return max(k.timeline.end for k in self.kinds)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time, 0 to 1, in which they wait for another stage, or have
        ended."""
        idle = self._sum(lambda k: k.timeline.total("wait for a stage") - k.timeline.end)
        return idle / self._time + 1 if self._time else 0.0

    @property
    def exposed_communication(self) -> float:
        """The part of all ranks' time, 0 to 1, in which they wait for a collective."""
        waits = self._sum(lambda k: k.timeline.total("wait for ranks"))
        return waits / self._time if self._time else 0.0

    @property
    def utilisation(self) -> float:
        """The model FLOPs utilisation, from 0 to 1. It is the time of the FLOPs of forwards and
        backwards, without those that are computed again, at the peak of their dtypes, as a part of
        the devices' time (Chowdhery et al., "PaLM", 2022, appendix B)."""
        peak = self.device.peak
        shortest = self._sum(lambda k: sum(op.flops / peak[op.dtype] for op in k.model_ops))
        return self.device.sharing * shortest / self._time if self._time else 0.0

    @property
    def flops(self) -> int:
        """Floating-point operations of all ranks together."""
        return int(self._sum(lambda k: k.flops))

    def share_of_stages(self) -> dict[int, float]:
        """Returns the part, 0 to 1, of all FLOPs that the ranks of each stage do; empty without a
        pipeline. ``Kind.flops_by("where")`` returns FLOPs by line."""
        out: Counter[int] = Counter()
        for k in self.kinds:
            if k.stage is not None:
                out[k.stage] += k.flops * len(k.ranks)
        return {stage: n / self.flops for stage, n in sorted(out.items())} if self.flops else {}

    @cached_property
    def layers(self) -> layer_shares.Flops:
        """FLOPs of all ranks together, by layer and phase, as ``Kind.layers`` of one rank."""
        return layer_shares.added(
            (layer, phases, len(k.ranks)) for k in self.kinds for layer, phases in k.layers.items()
        )

    def share_of_layers(self, depth: int | None = None) -> dict[str, float]:
        """Returns the part, 0 to 1, of all FLOPs that each layer does. Layers whose names have more
        than ``depth`` parts count for the module around them: "blocks.3" for "blocks.3.mlp.up"."""
        if depth is not None:
            check_int("share_of_layers: depth", depth, 1, "a number of names")
        layers = self.layers if depth is None else layer_shares.rolled_up(self.layers, depth)
        return {layer: sum(phases.values()) / self.flops for layer, phases in layers.items()}

    @cached_property
    def warnings(self) -> list[str]:
        """Sentences, each with a fact and its remedy."""
        return [*self.said, *findings(self.kinds, self.device, self.network)]

    def _sum(self, of: Any) -> float:
        return sum(of(k) * len(k.ranks) for k in self.kinds)

    @property
    def _time(self) -> float:
        return self.step_time * sum(len(k.ranks) for k in self.kinds)

    def on(self, *, device: Device | None = None, network: Network | None = None) -> Report:
        """Returns the report of the same step on another device, or over another network. The
        program does not run again; its collectives keep the backend of the first device."""
        device, network = device or self.device, network or self.network
        runs = [(k.ranks, k.rank, k.events) for k in self.kinds]
        rows = timelines(runs, self.world, device, network, self.measured)
        kinds = [replace(k, timeline=row) for k, row in zip(self.kinds, rows, strict=True)]
        return replace(self, kinds=kinds, device=device, network=network)

    # Some of them ---------------------------------------------------------------------------------

    def kind_of(self, rank: int) -> Kind:
        """Returns the kind of a rank. Raises ValueError for a rank that was not simulated."""
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

    def bytes_by_node(self, folder: str = "") -> dict[int, int]:
        """Returns {node: bytes of files in ``folder`` that its ranks write}. A file of several
        ranks counts for the node of the first one."""
        total: Counter[int] = Counter()
        for path, (n, ranks) in self.files.items():
            if path.startswith(folder):
                total[self.network.node(min(ranks))] += n
        return dict(sorted(total.items()))

    def _about_files(self) -> Iterator[str]:
        """Yields a line about each file; of a folder with many files one line."""
        folders: dict[str, list[str]] = {}
        for path in self.files:
            folders.setdefault(os.path.dirname(path) + os.sep, []).append(path)
        for folder, paths in folders.items():
            if len(paths) > _FILES:
                nodes = self.bytes_by_node(folder).values()
                yield (
                    f"not written: {folder}, {len(paths):,} files of {amount(sum(nodes))}; one of "
                    f"{len(nodes):,} nodes writes {amount(min(nodes))} to {amount(max(nodes))}"
                )
                continue
            for path in paths:
                n, ranks = self.files[path]
                yield f"not written: {path}, {amount(n)} of ranks {names_of(sorted(ranks))}"

    # As files and text ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures as plain data: bytes, counts, FLOPs, seconds."""
        return {
            "world": self.world,
            "device": self.device.name,
            "step_time": self.step_time,
            "bubble": self.bubble,
            "exposed_communication": self.exposed_communication,
            "utilisation": self.utilisation,
            "flops": self.flops,
            "share_of_stages": self.share_of_stages(),
            "share_of_layers": self.share_of_layers(),
            "flops_by_layer": self.layers,
            "updates": self.updates,
            "files": {path: {"bytes": n, "ranks": [*by]} for path, (n, by) in self.files.items()},
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
        kind of rank, with threads for computing, communication and waiting."""
        processes = []
        for k in self.kinds:
            spans = [
                (s.name, s.phase, _LANES.index(s.lane), s.start, s.end, {"where": s.where})
                for s in k.timeline.spans
            ]
            processes.append((f"ranks {names_of(k.ranks)}", k.rank, spans))
        return write_chrome_trace(path, processes, _LANES)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes one HTML page to ``path``, which loads nothing else: a table of the kinds,
        warnings, the layers that do most, and the pictures of ``to_svg``, with a time line to zoom
        into. Its element ``report`` has the figures of ``to_json``."""
        file = Path(path)
        html = page(self._summary, self.as_dict(), self._rows, self.kinds)
        file.write_text(html, encoding="utf-8")
        return file

    def to_svg(self, path: str | PathLike[str], picture: str = "timeline") -> Path:
        """Draws to ``path``, an .svg: the "timeline" of all kinds, the "memory" of the fullest kind
        over the step, or "communication", the bytes that a rank sends over each axis."""
        draw = {
            "timeline": lambda: pictures.timeline(self.kinds),
            "memory": lambda: pictures.memory(self.fullest),
            "communication": lambda: pictures.volume(self.kinds),
        }
        if picture not in draw:
            raise argument_error("to_svg: picture", picture, " or ".join(draw), ValueError)
        return write_svg("to_svg", draw[picture](), path)

    @property
    def _summary(self) -> str:
        return (
            f"{self.world:,} ranks of {len(self.kinds)} kinds on {self.device.name}: a step of "
            f"{seconds(self.step_time)}, {quantity(self.flops)}FLOP, utilisation "
            f"{self.utilisation:.1%}, bubble {self.bubble:.1%}, waiting for collectives "
            f"{self.exposed_communication:.1%}"
        )

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [(
            "ranks", "", "FLOP", "computes", "waits", "peak memory", "collectives", "sent",
            "messages", "sent", "between nodes",
        )]  # fmt: skip
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
        return rows

    def __str__(self) -> str:
        full = self.fullest
        held = [(f"  {name}", amount(n)) for name, n in full.memory.at_peak.items() if n]
        alike: dict[tuple[Any, ...], list[int]] = {}  # kinds that send the same are one
        for k in self.kinds:
            alike.setdefault(tuple(k.volume().items()), []).extend(k.ranks)
        sent = [
            (names_of(sorted(ranks)), axis, f"{n:,}", f"{b:,}")
            for volume, ranks in alike.items()
            for axis, (n, b) in volume
        ]
        shares = " ".join(f"{share:.1%}" for share in self.share_of_stages().values())
        staged = [f"FLOPs of the stages: {shares}", ""] if shares else []
        layered = [*table(layer_shares.rows(self.layers)), ""] if self.layers else []
        holds = " and ".join(f"{n:,} of {name}" for name, n in self.updates.items()) or "none"
        files = [*self._about_files()]
        return "\n".join([
            self._summary, f"updates of optimizers in the step: {holds}", "",
            *table(self._rows), "", *staged, *layered,
            f"memory of ranks {names_of(full.ranks)} at their peak, at {full.memory.where}:",
            *table(held or [("  nothing", "")]), "", "sent by one rank:",
            *table([("ranks", "axis", "number", "bytes"), *sent]),
            *(["", *files] if files else []), *(f"\nwarning: {w}" for w in self.warnings),
        ])  # fmt: skip
