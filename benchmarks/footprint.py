"""What a tensor and a plan cost in memory: plain, ours and DTensor.

    python benchmarks/footprint.py
    python benchmarks/footprint.py --markdown docs/performance.md  # and write the section

Resident memory of a process of its own for each number, rank 0 of a world of eight that is faked.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from table import CHECKPOINTS, machine, markdown

HEADING = "## Memory of calls"
COUNTS = {"tensors": 40_000, "plans": 400}
SIDES = {side.name: side for side in (sides.Plain, sides.Ours, sides.Theirs)}


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def a_tensor(side: Any) -> Callable[[int], Any]:
    """Another tensor of one memory."""
    x = side.place(torch.ones(8, 8), 0, None)
    return lambda i: x.detach()


def planned(call: Callable[[Any, Any], Any]) -> Callable[[Any], Callable[[int], Any]]:
    """A call of a kind that comes for the first time. Nothing of it is kept but the plan."""

    def build(side: Any) -> Callable[[int], Any]:
        def one(i: int) -> None:
            x = side.place(torch.ones(8, 16), 0, None)[:, : i % 15 + 1]
            x = x.unsqueeze(-1).expand(-1, -1, i + 1)
            call(x, x)

        return one

    return build


ROWS = {
    "a tensor beside its memory": ("tensors", a_tensor),
    "a plan of `add`": ("plans", planned(torch.add)),
    "a plan of `matmul`": ("plans", planned(lambda x, y: x @ y.transpose(-1, -2))),
    "a plan of `layer_norm`": ("plans", planned(lambda x, y: F.layer_norm(x, x.shape[-1:]))),
}


def measure(row: str, name: str) -> float:
    """Bytes for each, in this process."""
    kind, build = ROWS[row]
    count = COUNTS[kind]
    sides.start_fake_world()
    one = build(SIDES[name]((2, 4)))
    for i in range(50):  # what is made once
        one(i)
    before = resident()
    kept = [one(i) for i in range(50, 50 + count)]
    after = resident()
    del kept
    dist.destroy_process_group()
    return (after - before) / count


def apart(row: str, name: str) -> float:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--row", row, "--side", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def text(rows: list[list[str]]) -> str:
    return f"""{HEADING}

Bytes of resident memory for each object, in C++ and Python, with its share of tables.

{markdown(["", *SIDES], rows)}

- {machine()}.
- Command: `python benchmarks/footprint.py --markdown docs/performance.md`.
- *a tensor*: `x.detach()`, {COUNTS["tensors"]} of them. *a plan*: memory after
  {COUNTS["plans"]} calls on as many shapes, with the views that make the shapes; the oldest plans
  are dropped when there are too many.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", choices=ROWS)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--markdown", type=Path, help="the page whose section is written")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.row:
        print(measure(args.row, args.side))
        return
    rows = [[row, *(f"{apart(row, side):,.0f}" for side in SIDES)] for row in ROWS]
    written = text(rows)
    print(written)
    if args.markdown is not None:
        page = args.markdown.read_text(encoding="utf-8")
        before, found, rest = page.partition(f"{HEADING}\n")
        if found:
            rest = "## " + rest.partition("\n## ")[2]
        else:
            before, _, rest = page.partition(CHECKPOINTS)
            rest = CHECKPOINTS + rest
        args.markdown.write_text(f"{before}{written}\n{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
