"""The overhead of disttensor and torch DTensor over plain local code: one run, one table.

python benchmarks/overhead.py [--quick] [--only TEXT] [--device cuda] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import sides
import stages
import torch
import torch.distributed as dist
from cases import ROWS, Row
from table import DOCUMENT, OTHERS, Result, machine, render
from timing import FULL, QUICK, Effort, Fresh, best_times


def main() -> int:
    """Print the table; 1 where a side failed or computed something else than plain did."""
    args = parse()
    effort = QUICK if args.quick else FULL
    sides.DEVICE = args.device
    rows = [*ROWS, *stages.ROWS] if args.device == "cpu" else ROWS
    rows = [row for row in rows if args.only.lower() in row.name.lower()]
    warnings.filterwarnings("ignore", module="torch")
    if sides.dt is None:
        print("disttensor cannot be imported: its columns stay blank", file=sys.stderr)
    sides.start_fake_world()
    try:
        results = [measure(row, effort, f"[{i}/{len(rows)}]") for i, row in enumerate(rows, 1)]
    finally:
        dist.destroy_process_group()
    print(f"{machine()}\n\n{render(results)}")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        page = args.markdown.read_text(encoding="utf-8") if args.markdown.exists() else ""
        others = "".join(page.partition(OTHERS)[1:])  # sections that another benchmark writes
        text = document(results, effort)
        args.markdown.write_text(f"{text}\n{others}" if others else text, encoding="utf-8")
    return 1 if any(result.errors for result in results) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter slices: a noisier table")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the rows whose name has it"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page there too")
    return parser.parse_args()


def measure(row: Row, effort: Effort, progress: str) -> Result:
    """Build each side's call, compare what they compute, and time them in turns."""
    start = time.perf_counter()
    print(f"{progress} {row.name} ...", end=" ", file=sys.stderr, flush=True)
    result = Result(row)
    calls, first = {}, {}
    contestants = sides.contestants(row.replay)
    torch._dynamo.reset()
    for kind in contestants:
        try:
            torch.manual_seed(0)
            side = kind(row.mesh_shape)
            with kind.around(), torch.set_grad_enabled(row.grad):
                call = row.build(side)
                if call is None or (kind is sides.InC and isinstance(call, Fresh)):
                    continue  # C takes no part in a call of a new kind
                calls[kind.name] = call
                first[kind.name] = calls[kind.name]()
            same = kind.name in row.same or (
                sides.OURS in row.same and issubclass(kind, sides.Ours)
            )
            if same:
                torch.testing.assert_close(side.to_local(first[kind.name]), first[sides.PLAIN])
        except Exception as error:  # the other sides are still worth their numbers
            calls.pop(kind.name, None)
            result.errors[kind.name] = f"{type(error).__name__}: {error}"
    with torch.set_grad_enabled(row.grad):
        around = {kind.name: kind.around for kind in contestants}
        result.seconds = best_times(calls, effort, around)
    print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
    for name, error in result.errors.items():
        print(f"    {name} failed: {error}", file=sys.stderr)
    return result


def document(results: list[Result], effort: Effort) -> str:
    return DOCUMENT.format(
        table=render(results),
        machine=machine(),
        command=" ".join(["python benchmarks/overhead.py", *sys.argv[1:]]),
        repeats=effort.repeats,
        slice_ms=effort.slice_s * 1e3,
        fresh=effort.fresh,
    )


if __name__ == "__main__":
    sys.exit(main())
