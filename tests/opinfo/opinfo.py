"""Coverage of torch functions, measured by PyTorch's own database of them (op_db).

    python -m tests.opinfo.opinfo                      a table of every OpInfo in float32
    python -m tests.opinfo.opinfo --ops add,std.unbiased --most 20

Each OpInfo runs on two real ranks: its samples as they are (sizes that do not divide, no elements,
0-d), each with its tensors in the layouts of ``opinfo_check.LAYOUTS``, also in place and with out=
where there are such variants; with --world 4 on a 2x2 mesh, in placements drawn by its name,
pending sums among them. Value, shape, dtype and the gradient of every input are compared with plain
torch on the full tensors, as are the bits of replicas. Of random functions shape and dtype are
compared; what plain torch refuses is left out.

A function that kills its ranks, or hangs, is named; the others go on in new processes.
tests/opinfo/opinfo_check.py is what the ranks do.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.opinfo.opinfo_check import DTYPES, LIMIT, OPS, Result, on_rank
from tests.support import pool

# OpInfos that fail, and why. One that passes does not belong here.
KNOWN = {
    "resize_": "refused: a DistTensor is not given other memory",
    "sparse.mm.reduce": "sparse layouts are not DistTensors",
    "sparse.sampled_addmm": "sparse layouts are not DistTensors",
}

BATCH = 40  # OpInfos in one call of the pool


def jobs_of(names: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """(OpInfo, dtype) for those that the OpInfo supports."""
    return [
        (name, dtype)
        for dtype in dtypes
        for name in names
        if getattr(torch, dtype) in OPS[name].supported_dtypes("cpu")
    ]


def measure(
    jobs: Sequence[tuple[str, str]],
    most: int = 4,
    world: int = 2,
    say: Callable[[Result], None] = lambda r: None,
) -> list[Result]:
    """The results of these jobs. One that kills its ranks, or lets them hang, fails with what they
    say."""
    results: list[Result] = []
    while len(results) < len(jobs):
        batch, error = list(jobs[len(results) :][:BATCH]), ""
        with tempfile.TemporaryDirectory(prefix="opinfo-") as folder:
            notes, limit = Path(folder) / "notes", LIMIT * len(batch)
            run = folder + str(len(results))
            try:
                pool.run_on_ranks(world, on_rank, batch, most, str(notes), run, timeout=limit)
            except pool.RanksFailed as failed:
                stacks = [notes.with_suffix(f".{rank}-stack") for rank in range(world)]
                shown = [f.read_text()[:2000] for f in stacks if f.exists()]
                error = "\n".join([f"ranks failed: {failed}", *filter(None, shown)])
            files = [notes.with_suffix(f".{rank}") for rank in range(world)]
            lines = [f.read_text().splitlines() if f.exists() else [] for f in files]
        each = [[json.loads(x) for x in of_rank] for of_rank in lines]
        done = min(([x["done"] for x in notes if "done" in x] for notes in each), key=len)
        found = [Result(**x) for x in done]
        if error:  # by whom is not done on every rank
            found = found[: len(batch) - 1]
            found.append(Result(*batch[len(found)], 1, failures=[("all", error)]))
        for result in found:
            say(result)
        results += found
    return results


def kind_of(problem: str) -> str:
    """The problem without what differs between functions and samples: for grouping."""
    text = re.sub(r" \[[\w. :]+\.py:\d+.*\]$", "", problem.split("\n")[0])
    text = re.sub(r"\[[^\]]*\]|-?\d[\d.e+-]*", "_", text)
    return text[:110]


def table(results: Sequence[Result], verbose: bool) -> str:
    """A line per OpInfo that failed, then the reasons by number, then the sums."""
    lines = []
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for r in sorted(results, key=lambda r: (r.name, r.dtype)):
        if not r.failures:
            if verbose:
                lines.append(
                    f"pass  {r.name} {r.dtype}: {r.cases} cases, {r.gradients} with gradients, "
                    f"{r.gathered} gathered"
                )
            continue
        known = f" (known: {KNOWN[r.name]})" if r.name in KNOWN else ""
        lines.append(f"FAIL  {r.name} {r.dtype}: {len(r.failures)} of {r.cases} cases{known}")
        by_kind: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
        for case, problem in r.failures:
            by_kind[kind_of(problem)].append((case, problem))
        for kind, cases in by_kind.items():
            lines.append(f"        {len(cases)}x {cases[0][0]}: {cases[0][1]}")
            reasons[kind].append(r.name)
    lines += ["", "Reasons:"]
    for kind, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(names):4} {kind}: {' '.join(dict.fromkeys(names))[:200]}")
    failed = [r for r in results if r.failures]
    wrong = sorted({r.name for r in failed if any(is_wrong(p) for _, p in r.failures)})
    lines += [
        "",
        f"{len(results) - len(failed)} of {len(results)} pass, in {sum(r.cases for r in results)} "
        f"cases, {sum(r.gradients for r in results)} with gradients",
        f"{len(wrong)} give a wrong number: {' '.join(wrong)}",
        f"{sum(bool(r.gathered) for r in results)} gather their inputs in some case",
        f"{sum(not r.cases for r in results)} have no case (no tensor among the arguments)",
    ]
    return "\n".join(lines)


def is_wrong(problem: str) -> bool:
    return problem.startswith(("value", "gradient", "gives", "replicas", "shape", "dtype"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo.opinfo", description=__doc__)
    parser.add_argument("--ops", help="names, separated by commas (all)")
    parser.add_argument("--most", type=int, default=4, help="samples of each OpInfo (4)")
    parser.add_argument("--dtypes", default="float32", help="separated by commas, or 'all'")
    parser.add_argument("--world", type=int, default=2, help="2, or 4 as 2x2")
    parser.add_argument("--part", help="K/N: every N-th, from the K-th")
    parser.add_argument("--verbose", action="store_true", help="a line for those that pass too")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(argv)
    names = options.ops.split(",") if options.ops else list(OPS)
    if missing := [n for n in names if n not in OPS]:
        parser.error(f"no OpInfo is called {', '.join(missing)}")
    every = [str(d).removeprefix("torch.") for d in DTYPES]
    jobs = jobs_of(names, every if options.dtypes == "all" else options.dtypes.split(","))
    if options.part:
        k, n = map(int, options.part.split("/"))
        jobs = jobs[k::n]
    say = lambda r: print(end="F" if r.failures else ".", flush=True)  # noqa: E731
    results = measure(jobs, options.most, options.world, say)
    print("\n" + table(results, options.verbose))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(r) for r in results]))
    return int(any(r.failures and r.name not in KNOWN for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
