"""What was measured, as text: a Markdown table that reads well in a terminal too."""

from __future__ import annotations

import os
import platform
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from cases import Row
from sides import IN_C, OURS, OURS_COMPILED, PLAIN, PLAIN_COMPILED, REPLAYED, THEIRS

COLUMNS = (
    "", PLAIN, f"{OURS} (Python)", IN_C, REPLAYED, f"torch {THEIRS}", "Python / plain", "C / plain",
    "replay / plain", f"{THEIRS} / plain", "compiled plain / plain", "ours compiled / plain",
    "aim", "met",
)  # fmt: skip


@dataclass
class Result:
    """Seconds per call by side; sides that failed or did not take part are absent."""

    row: Row
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, side: str) -> float | None:
        """Against plain; None where a side is missing, or the row is about planning alone."""
        planning = self.row.target is not None and self.row.target.unit == "ms"
        if planning or side not in self.seconds or PLAIN not in self.seconds:
            return None
        return self.seconds[side] / self.seconds[PLAIN]

    def met(self) -> bool | None:
        """Whether disttensor reached the aim, in C where there is a compiler; None where there is
        nothing to compare."""
        side = IN_C if IN_C in self.seconds else OURS
        aim, seconds = self.row.target, self.seconds.get(side)
        if aim is None or seconds is None:
            return None
        value = {"x": self.ratio(side), "ms": seconds * 1e3, "µs": seconds * 1e6}[aim.unit]
        return None if value is None else value <= aim.limit

    def cells(self) -> list[str]:
        times = [self._time(side) for side in (PLAIN, OURS, IN_C, REPLAYED, THEIRS)]
        others = OURS, IN_C, REPLAYED, THEIRS, PLAIN_COMPILED, OURS_COMPILED
        ratios = [_ratio(self.ratio(side)) for side in others]
        met = {True: "yes", False: "no", None: ""}[self.met()]
        return [self.row.name, *times, *ratios, str(self.row.target or ""), met]

    def _time(self, side: str) -> str:
        if side in self.errors:
            return "error"
        return format_time(self.seconds[side]) if side in self.seconds else ""


def format_time(seconds: float) -> str:
    micros = seconds * 1e6
    if micros < 1000:
        return f"{micros:.3g} µs"
    return f"{micros / 1e3:.3g} ms"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def render(results: Iterable[Result]) -> str:
    """The results as one aligned Markdown table."""
    return markdown(COLUMNS, [result.cells() for result in results])


def markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], texts: Container[int] = (0,)
) -> str:
    """An aligned Markdown table; the columns of ``texts`` begin at the left, numbers end at the
    right."""
    lines = [list(columns), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    rule = ["-" * w if i in texts else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def text(cells: Sequence[str]) -> str:
        padded = zip(cells, widths, strict=True)
        return (
            "| "
            + " | ".join(
                c.ljust(w) if i in texts else c.rjust(w) for i, (c, w) in enumerate(padded)
            )
            + " |"
        )

    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def write_between(marks: tuple[str, str], page: Path, text: str) -> None:
    """``text`` in place of what stands between the two marks of the page."""
    before, rest = page.read_text().split(marks[0])
    after = rest.split(marks[1])[1]
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}")


def machine() -> str:
    """The date, the CPU, cores, system and versions, in one line."""
    cpu = _cpu_model() or platform.processor() or platform.machine()
    return (
        f"{date.today()}, {cpu}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _cpu_model() -> str | None:
    """The name of the CPU, with family and model where it comes without a number."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            facts = dict(
                (part.strip() for part in line.split(":", 1)) for line in lines if ":" in line
            )
    except OSError:
        return None
    name = facts.get("model name")
    if name is None or any(char.isdigit() for char in name):
        return name
    return f"{name} (family {facts.get('cpu family')}, model {facts.get('model')})"


# Here a page goes on with what data_parallel.py writes, and checkpoint.py.
OTHERS, CHECKPOINTS = "## Data parallelism", "## Checkpoints"

DOCUMENT = """\
# Performance

This page measures the overhead of the runtime per call, in Python and C++, with arithmetic as small
as possible and without a network. It does not measure throughput. Each list below a table gives
the date, the machine and the command.

{table}

- {machine}.
- Command: `{command}` (`make bench` prints the
  same table).

## How it is measured

- One process, one thread. It is rank 0 of a world of eight whose process group is PyTorch's `fake`
  backend: every collective is launched and returns immediately, so waiting for other ranks and the
  network cost nothing. "Mesh of 1" is a mesh that contains only this rank.
- All sides compute on local tensors of the same size. *plain* is ordinary PyTorch on these, with
  communication written by hand: the block with Megatron's f and g around the linears (two
  all-reduces forward, two backward), the gather as one autograd function.
- *disttensor (Python)* and *disttensor (C)* are the same program with the same plan for each call.
  Calls whose plan is cached are run by `disttensor/dispatch/dispatch.py`, or by `native.c`, which
  is compiled if there is a compiler.
- *compiled plain* is plain PyTorch under `torch.compile`, and *ours compiled* is `dt.compile`, both
  with inductor: see [compile](compile.md#numbers). Compilation is part of the warm-up.
- *torch DTensor* runs the same program on DTensors. The block is shown a second time with
  `parallelize_module` (`ColwiseParallel`, `RowwiseParallel`): code between the linears is local.
- Forward+backward includes freeing the gradients of the step before, as `zero_grad` does.
- The sides of a row alternate (A B C A B C ...), {repeats} slices of about {slice_ms:g} ms
  each after a warm-up that fixes the number of calls in a slice; the best slice counts. It is
  CPU time, so that other work on the machine does not count; garbage is collected between slices.
- "New shape" rows time calls on shapes that have no plan yet ({fresh} calls per slice, their inputs
  made beforehand): the cost of making a plan.
- If collectives cannot change the result, it is compared with the plain result before timing.
- "outside" rows are calls on tensors of a stage that this rank is not in; their "plain" is always
  `torch.add` of 8x8. In the rows of 96 layers this rank is the fourth of eight stages of twelve
  blocks each; "plain" are its own twelve blocks, as DistTensors, without the other stages.
- "Aim" is a limit for the ratio to plain (x), or for the time.
"""
