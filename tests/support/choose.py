"""Chooses the quick tests among the candidates: cases that run the most lines of the packages in
the least time (``make choose``).

A line counts 1 for the first case that runs it, ``AGAIN`` for the second, ``AGAIN`` ** 2 for the
third. These are kept: cases of at most ``CHEAP`` seconds that run at most ``FEW`` lines (many read
the files of the repository), the main test of each feature, and the functions in ``killers.txt``,
which noticed a mutant that no other quick test noticed. Then cases are taken by what they add in a
second, as long as it is ``LEAST``; each file keeps a case of at most ``BRIEF`` seconds, if it has
one. The other candidates are written to ``repeats.txt``.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.quick import REPEATS, ROOT, functions_of

AGAIN = 0.3
CHEAP = 0.1  # seconds, with the notes
FEW = 60  # lines
BRIEF = 5.0  # seconds, with the notes
LEAST = 5.0  # lines that a case adds in a second, with the notes
KILLERS = REPEATS.with_name("killers.txt")
HEAD = "# Candidates whose lines other quick tests run. From: make choose"


class Case(NamedTuple):
    """``name``: "first tests/file.py::function", or "last", of the cases of a function.
    ``is_cheap``: it runs few lines, and both cases take at most ``CHEAP`` seconds, with
    fixtures."""

    name: str
    seconds: float
    lines: list[int]
    is_cheap: bool = False

    @property
    def function(self) -> str:
        return self.name.partition(" ")[2]

    @property
    def file(self) -> str:
        return self.function.partition("::")[0]


def cases_of(rows: Iterable[tuple[str, float, list[int]]]) -> list[Case]:
    """Returns the candidates. ``rows``: name, seconds and lines. A case may have started the ranks
    of others too: the shorter case of a function counts for both."""
    cases = [Case(name, max(0.01, seconds), lines) for name, seconds, lines in rows]
    times = defaultdict(list)
    for case in cases:
        times[case.function].append(case.seconds)
    return [
        case._replace(seconds=min(found), is_cheap=max(found) <= CHEAP and len(case.lines) <= FEW)
        for case in cases
        for found in [times[case.function]]
    ]


def chosen(cases: Iterable[Case], firm: Collection[str], least: float = LEAST) -> set[str]:
    """Returns the names of the cases to keep. ``firm``: functions whose cases are kept."""
    kept, counts = set[str](), Counter[int]()

    def worth(case: Case) -> float:
        return sum(AGAIN ** counts[n] for n in case.lines) / case.seconds

    def keep(case: Case) -> None:
        kept.add(case.name)
        counts.update(case.lines)

    others = []
    for case in cases:
        if case.function in firm or case.is_cheap:
            keep(case)
        else:
            others.append(case)
    queue = [(-worth(case), case) for case in others]
    rest = defaultdict(list)
    heapq.heapify(queue)
    while queue:
        _, case = heapq.heappop(queue)
        now = worth(case)
        if queue and now < -queue[0][0]:
            heapq.heappush(queue, (-now, case))
        elif now >= least:
            keep(case)
        else:
            rest[case.file].append(case)
    files = {name.partition(" ")[2].partition("::")[0] for name in kept if name[:5] == "first"}
    firsts = {
        f: [c for c in rest[f] if c.name[:5] == "first" and c.seconds <= BRIEF]
        for f in rest.keys() - files
    }
    return kept | {min(cases, key=lambda c: c.seconds).name for cases in firsts.values() if cases}


def killers() -> list[str]:
    """Returns the functions that noticed a mutant that no other quick test noticed."""
    return [line for line in KILLERS.read_text().splitlines() if line[:1] != "#"]


def main(folder: Path) -> None:
    rows = [json.loads(line) for f in folder.glob("*.jsonl") for line in f.open()]
    cases = cases_of(rows)
    files = {case.file for case in cases}
    features = [name for f in files for name, text in functions_of(ROOT / f).items() if text]
    kept = chosen(cases, [*features, *killers()])
    others = [case.name for case in cases if case.name not in kept]
    others.sort(key=lambda name: name.split()[::-1])
    REPEATS.write_text("\n".join([HEAD, *others, ""]))
    lines = {n for case in cases for n in case.lines}
    run = {n for case in cases if case.name in kept for n in case.lines}
    seconds = sum(case.seconds for case in cases if case.name in kept)
    print(
        f"{len(kept)} of {len(cases)} cases run {len(run)} of {len(lines)} lines: {seconds:.0f} s"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
