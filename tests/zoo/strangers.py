"""Small models of other people's libraries, on two ranks against plain torch.

    python -m tests.zoo.strangers                            all that are installed, with a table
    python -m tests.zoo.strangers --only zuko                one, with the traceback of its error
    python -m tests.zoo.strangers --markdown docs/zoo.md  writes the table there

``make strangers`` installs the libraries of ``strangers.txt`` in a folder of their own, without
what they depend on. Each model runs under data parallelism, tensor parallelism and stage 3 of
``shard_data_parallel``; see ``check.on_rank``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support import pool
from tests.zoo import check, table
from tests.zoo.stranger_models import BUILDERS
from tests.zoo.zoo import Ranks, measure

PREFIX = "pypi."
AXES = ("dp", "tp", "stage 3")
BEGIN, END = "<!-- the table of libraries -->", "<!-- the end of libraries -->"


class Stranger(NamedTuple):
    """The model of one library, in the first dtype in which plain torch runs it."""

    library: str
    dtype: torch.dtype

    @property
    def shown(self) -> str:
        return importlib.metadata.version(self.library)

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        random.seed(3)
        torch.manual_seed(3)
        model, args = BUILDERS[self.library]()
        args = tuple(t.to(self.dtype) if t.is_floating_point() else t for t in args)
        if self.dtype is not torch.float32:  # as it was made, complex parameters too
            model = model.to(self.dtype)
        return Positional(model.eval()), {f"x{i}": t for i, t in enumerate(args)}


class Positional(nn.Module):
    """Passes its named arguments on by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(*batch.values())


def recipe(name: str) -> Stranger:
    """Raises what the last dtype raised."""
    for dtype in (torch.float64, torch.float32):
        found = Stranger(name.removeprefix(PREFIX), dtype)
        try:
            check.run(*found.build())
            return found
        except Exception:
            if dtype is torch.float32:
                raise
    raise AssertionError("no dtype")


def installed(library: str) -> bool:
    return any(importlib.metadata.distributions(name=library))


def rows(entries: Sequence[dict[str, Any]]) -> str:
    """One row for each library."""
    lines = ["| library | version | " + " | ".join(AXES) + " |", "|---|---|---|---|---|"]
    for e in entries:
        library = e["name"].removeprefix(PREFIX)
        if "small" in e:
            lines.append(f"| {library} | not run: {table._short(e['small'], 90)} | | | |")
            continue
        ends = [e[a] for a in AXES]
        shown = [
            table.KINDS[x["kind"]]
            + ("" if x["kind"] == "right" else f": {table._short(x['says'], 90)}")
            for x in ends
        ]
        lines.append(f"| {library} | {e['shown']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def report(
    prog: str,
    argv: Sequence[str],
    measured: Callable[[str, Ranks, Ranks], dict[str, Any]],
    rows: Callable[[Sequence[dict[str, Any]]], str],
    begin: str,
    end: str,
) -> int:
    """Measures libraries, prints what becomes of each, and writes the table between two markers.
    Returns 1 if a library is not right."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("--only", help="some, separated by commas, with their tracebacks")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(argv)
    names = options.only.split(",") if options.only else [n for n in BUILDERS if installed(n)]
    pool.warning_filters[:] = ["ignore"]
    one, two = Ranks(1), Ranks(2)
    entries = []
    try:
        for i, name in enumerate(names):
            entry = measured(name, one, two)
            entries.append(entry)
            ends = [f"{a} {entry[a]['kind']}: {entry[a]['says']}" for a in AXES if a in entry]
            print(
                f"{i + 1}/{len(names)} {name}", *(ends or [entry["small"]]), sep=" | ", flush=True
            )
            if options.only:
                print(entry.get("trace", ""), *(entry[a]["trace"] for a in AXES if a in entry))
    finally:
        one.stop()
        two.stop()
    page = (
        f"torch {torch.__version__.partition('+')[0]}; {len(entries)} libraries.\n\n{rows(entries)}"
    )
    print(page)
    if options.markdown:
        text = options.markdown.read_text(encoding="utf-8")
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        options.markdown.write_text(f"{before}{begin}\n{page}\n{end}{after}", encoding="utf-8")
    return int(any(e[a]["kind"] != "right" for e in entries for a in AXES if a in e))


def main(argv: Sequence[str]) -> int:
    def measured(name: str, one: Ranks, two: Ranks) -> dict[str, Any]:
        return measure(PREFIX + name, one, two, AXES)

    return report("tests.zoo.strangers", argv, measured, rows, BEGIN, END)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
