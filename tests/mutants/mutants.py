"""Do tests notice a change of the code? Mutants of rules, reshards, gradient types, and of the
packages above them (``PARTS``).

    python -m tests.mutants.mutants --sample 100 --seed 1     100 at random
    python -m tests.mutants.mutants --part schedules          all of a part
    python -m tests.mutants.mutants --file ops/notation.py    all of a file

Each runs in a fork of this process, which has torch in memory and nothing of ours, on the tests
that ran the changed line, on ranks too, the shortest first. One that no test notices is printed as
the lines that differ, and how many tests ran: it wants a test, or shows code that is not needed.
Which test runs which line is found once for the tests of a part, and again when a test's file
changes (``out/mutants.json``).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  (in memory before a fork, as torch is)
import pytest
import torch

from tests.mutants import statements
from tests.mutants.changed import ROOT, ChangedFile, set_environment
from tests.mutants.mutations import Mutant, mutants

KEPT = ROOT / "out" / "mutants.json"
FOLDERS = ("simulate", "fsdp", "pipeline", "trace", "checkpoint", "comm")
# What is changed, and the folder of the tests that should notice it.
PARTS: dict[str, tuple[str, str]] = {
    "ops": ("ops/**/*.py", "ops"),
    "reshard": ("reshard/**/*.py", "reshard"),
    "gradients": ("disttensor/autograd/grad_types.py", "autograd"),
    "schedules": ("disttensor/pipeline/schedule*.py", "pipeline"),
    **{folder: (f"disttensor/{folder}/*.py", folder) for folder in FOLDERS},
}
LIMIT = 120  # seconds for one
MOST_TIME = 60.0  # seconds of a processor that the tests of one may take, as measured before


class Tests:
    """A pytest plugin that leaves out slow tests. With ``watched`` files, it notes which test runs
    which of their lines, on the ranks too."""

    def __init__(self, watched: Iterable[str] = ()) -> None:
        self.watched = frozenset(watched)
        self.lines: dict[str, dict[int, list[str]]] = collections.defaultdict(dict)
        self.times: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if not self.watched:
            return (yield)
        statements.forget()
        statements.take()
        clock = time.monotonic if hasattr(item.obj, "on_ranks_timeout") else time.process_time
        start = clock()
        try:
            return (yield)
        finally:
            self.times[item.nodeid] = clock() - start
            for file, line in statements.by_file(statements.take()):
                if file in self.watched:
                    self.lines[file].setdefault(line, []).append(item.nodeid)


def in_fork(work: Callable[[], int], limit: float) -> int | None:
    """What ``work`` returns, in a child whose words nobody hears. None: it took too long."""
    child = os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        status = 99
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def run_tests(tests: Sequence[str], plugin: Tests, *options: str) -> int:
    base = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return int(pytest.main([*base, *tests], plugins=[plugin]))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def who_comes_by(files: Sequence[Path], folders: Iterable[str]) -> dict[str, Any]:
    """{"lines": {file: {line: tests}}, "times": {test: seconds}, "sources", "tests": {file:
    digest}}. Kept; files of tests that changed are run anew."""
    known: dict[str, Any] = {k: {} for k in ("lines", "times", "sources", "tests")} | {"failed": []}
    if KEPT.exists():
        known = json.loads(KEPT.read_text())
    found = [f for name in folders for f in sorted(ROOT.glob(f"tests/{name}/test_*.py"))]
    tests = {str(f.relative_to(ROOT)): digest(f) for f in found}
    changed = [name for name in tests if known["tests"].get(name) != tests[name]]
    if not changed:
        return known
    print(f"which test of {len(changed)} files comes by which line?", flush=True)
    kept = known["tests"].keys() - set(changed)
    known["times"] = {t: s for t, s in known["times"].items() if t.partition("::")[0] in kept}
    for lines in known["lines"].values():
        for line, names in lines.items():
            lines[line] = [test for test in names if test in known["times"]]

    def work() -> int:
        statements.start()
        plugin = Tests(str(f.relative_to(ROOT)) for f in files)
        status = run_tests(changed, plugin)
        for file, lines in plugin.lines.items():
            for line, names in lines.items():
                those = [name for name in names if name not in plugin.failed]
                known["lines"].setdefault(file, {}).setdefault(str(line), []).extend(those)
        known["times"].update(plugin.times)
        before = {t for t in known["failed"] if t.partition("::")[0] in kept}
        known["failed"] = sorted(plugin.failed | before)
        old = known["sources"] if kept else {}  # the lines of other tests are of these
        known["tests"] |= tests
        known["sources"] = {str(f.relative_to(ROOT)): digest(f) for f in files} | old
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(known))
        return status

    status = in_fork(work, 3600)
    if status not in (0, 1, 5):  # 5: a file has no such test
        raise SystemExit(f"the tests cannot be run (pytest says {status})")
    known = json.loads(KEPT.read_text())
    if known["failed"]:
        print("left out, as they fail without a change:", *known["failed"])
    return known


def tests_of(mutant: Mutant, known: dict[str, Any]) -> tuple[list[str], int]:
    """Those that come by its lines, the shortest first, as many as MOST_TIME allows; and of how
    many. Where none does (a table that is made at import), or the file changed since, those that
    come by its file; where none does that either (what others call at import), all."""
    file = str(mutant.path)
    lines = known["lines"].get(file, {})
    current = known["sources"].get(file) == digest(ROOT / file)
    at = [str(line) for line in mutant.lines] if current else []
    found = {test for line in at for test in lines.get(line, [])}
    found = found or {test for tests in lines.values() for test in tests}
    found = found or known["times"].keys() - set(known["failed"])
    total, chosen = 0.0, []
    for test in sorted(found, key=lambda test: (known["times"][test], test)):
        total += known["times"][test]
        if chosen and total > MOST_TIME:
            break
        chosen.append(test)
    return chosen, len(found)


def survives(mutant: Mutant, tests: Sequence[str]) -> bool:
    def work() -> int:
        set_environment(MUTANT_PATH=str(mutant.path), MUTANT_SOURCE=mutant.source)
        sys.meta_path.insert(0, ChangedFile(mutant.path, mutant.source))
        return run_tests(tests, Tests(), "-x")

    return in_fork(work, LIMIT) == 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.mutants", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated")
    parser.add_argument("--file", type=Path, action="append", help="may be repeated")
    parser.add_argument("--sample", type=int, help="so many, at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    every = {f: folder for code, folder in PARTS.values() for f in sorted(ROOT.glob(code))}
    files = options.file or [f for part in options.part or PARTS for f in ROOT.glob(PARTS[part][0])]
    files = sorted(f.resolve() for f in files)
    found = [m for f in files for m in mutants(f.relative_to(ROOT))]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    folders = dict.fromkeys(every[f] for f in files) if set(files) <= every.keys() else FOLDERS
    known = who_comes_by(list(every), folders)
    left = []
    for i, mutant in enumerate(found):
        tests, count = tests_of(mutant, known)
        if survives(mutant, tests):
            left.append(mutant)
            of = "" if len(tests) == count else f" of {count}"
            print(f"\n{i + 1}/{len(found)} {mutant}\n  {len(tests)}{of} tests", flush=True)
        else:
            print(end=".", flush=True)
    print(f"\n{len(found)} mutants, {len(found) - len(left)} killed, {len(left)} survive")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
