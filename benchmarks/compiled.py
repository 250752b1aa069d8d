"""Compiled steps: plain PyTorch, disttensor (eager, replayed, compiled) and DTensor (eager,
compiled), forward and backward, on fake ranks: one run, one table.

python benchmarks/compiled.py [--device cuda] [--only TEXT] [--memory]

With --memory, a second table shows the most memory that a step allocates.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate

import cases
import sides
import torch
import torch.distributed as dist
from table import machine, markdown
from timing import FULL, best_times
from torch import Tensor

Forward = Callable[[], Tensor]


class TheirsCompiled(sides.Theirs):
    name = "torch DTensor, compiled"

    def forward(self, function: Forward) -> Forward:
        return torch.compile(function, dynamic=False)


SIDES = [
    sides.Plain, sides.PlainCompiled, sides.InC, sides.Replayed, sides.OursCompiled, sides.Theirs,
    TheirsCompiled,
]  # fmt: skip
COLUMNS = ["", *[side.name for side in SIDES], "breaks", "ours / plain, compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows whose name has it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    sides.DEVICE = args.device
    warnings.filterwarnings("ignore")
    sides.start_fake_world()
    rows = [row for row in cases.ROWS if row.replay and args.only.lower() in row.name.lower()]
    print(f"{machine()}, {args.device}\n\n{markdown(COLUMNS, [measure(row) for row in rows])}")
    if args.memory:
        columns = ["", *[side.name for side in SIDES]]
        print(f"\n{markdown(columns, [memory(row) for row in rows])}")
    dist.destroy_process_group()


def measure(row: cases.Row) -> list[str]:
    calls, first, built = {}, {}, {}
    for kind in SIDES:
        try:
            torch.manual_seed(0)
            torch._dynamo.reset()
            built[kind.name] = side = kind(row.mesh_shape)
            with kind.around():
                call = row.build(side)
                start = time.perf_counter()
                for _ in range(3):
                    call()
            calls[kind.name], first[kind.name] = call, time.perf_counter() - start
        except Exception as error:
            print(f"{row.name}: {kind.name} failed: {str(error)[:300]}", file=sys.stderr)
    around = {kind.name: getattr(kind, "around", nullcontext) for kind in SIDES}
    took = best_times(calls, FULL, around)
    ours, plain = took.get(sides.OURS_COMPILED), took.get(sides.PLAIN_COMPILED)
    cells = [cell(took.get(k.name), took[sides.PLAIN], first.get(k.name)) for k in SIDES]
    compiled = getattr(built[sides.OURS_COMPILED], "compiled", None)
    cells.append(", ".join(compiled.breaks()) or "0" if compiled else "error")
    line = [row.name, *cells, f"{ours / plain:.2f}x" if ours and plain else ""]
    print(line, file=sys.stderr, flush=True)
    return line


def memory(row: cases.Row) -> list[str]:
    cells = []
    for kind in SIDES:
        torch.manual_seed(0)
        torch._dynamo.reset()
        with kind.around():
            call = row.build(kind(row.mesh_shape))
            for _ in range(4):
                call()
            cells.append([peak(call) for _ in range(2)][-1])
    return [row.name, *[f"{some / 1024:.0f} KiB ({some / cells[0]:.2f}x)" for some in cells]]


def peak(call: Callable[[], object]) -> int:
    """Bytes that the call allocates at most, beyond what it finds."""
    gc.collect()
    if sides.DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate([size for _, size in sorted(changes)], initial=0))


def cell(seconds: float | None, base: float, first: float | None) -> str:
    """Time of a step, its ratio to plain, and the time of the first three steps."""
    if seconds is None:
        return "error"
    return f"{seconds / base:.2f}x, {seconds * 1e3:.2f} ms ({first:.1f} s)"


if __name__ == "__main__":
    main()
