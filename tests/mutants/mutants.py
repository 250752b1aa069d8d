"""Do tests notice a change of the code? Mutants of the parts whose tests need no processes: rules,
reshards, the table of gradient types, schedules.

    python -m tests.mutants.mutants --sample 100 --seed 1     100 at random
    python -m tests.mutants.mutants --part schedules          all of a part
    python -m tests.mutants.mutants --file ops/notation.py    all of a file

Each runs in a fork of this process, which has torch in memory and nothing of ours, on the tests
that came by the changed line, the shortest first. One that no test notices is printed as the lines
that differ, and how many tests ran: it wants a test, or shows code that is not needed. Which test
comes by which line is found once, and again when a test's file changes (``out/mutants.json``).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy  # noqa: F401  (in memory before a fork, as torch is)
import pytest
import torch

from tests.mutants.mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "out" / "mutants.json"
PURE = [f"tests/{room}/test_*.py" for room in ("ops", "reshard", "pipeline", "autograd")]
# What is changed.
PARTS: dict[str, str] = {
    "ops": "ops/**/*.py",
    "reshard": "reshard/**/*.py",
    "gradients": "disttensor/autograd/grad_types.py",
    "schedules": "disttensor/pipeline/schedule*.py",
}
LIMIT = 120  # seconds for one
MOST_TIME = 60.0  # seconds of a processor that the tests of one may take, as measured before


class Pure:
    """Leaves out what needs processes, or takes long. With ``lines``, notes who comes by where."""

    def __init__(self, watched: Iterable[str] = ()) -> None:
        self.watched = frozenset(watched)
        self.lines: dict[str, dict[int, list[str]]] = collections.defaultdict(dict)
        self.times: dict[str, float] = {}
        self.failed: set[str] = set()
        self.seen: set[tuple[str, int]] = set()  # of the test that runs
        if self.watched:
            threading.settrace(self.trace)  # once: the threads of simulated ranks are kept

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.watched:
            return None
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    def forget(self) -> None:
        """What a watched file remembers of an earlier test."""
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) in self.watched:
                for value in vars(module).values():
                    getattr(value, "cache_clear", int)()
                    if type(value).__module__ == "disttensor.cache":
                        value.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item
            for item in items
            if not hasattr(item.obj, "on_ranks_timeout") and not item.get_closest_marker("slow")
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if not self.watched:
            return (yield)
        self.forget()
        self.seen.clear()
        start = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.times[item.nodeid] = time.process_time() - start
            for file, line in self.seen:
                self.lines[str(Path(file).relative_to(ROOT))].setdefault(line, []).append(
                    item.nodeid
                )


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one file with other contents."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.file = mutant, str(ROOT / mutant.path)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        inner = Path(*name.split("."))
        if self.mutant.path not in (inner.with_suffix(".py"), inner / "__init__.py"):
            return None
        inside = [str(Path(self.file).parent)] if self.mutant.path.stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=inside
        )

    def get_filename(self, fullname: str) -> str:
        return self.file

    def get_data(self, path: str | bytes) -> bytes:
        return self.mutant.source.encode()

    def path_stats(self, path: str | bytes) -> Any:
        raise OSError("no bytecode is kept")


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


def run_tests(tests: Sequence[str], plugin: Pure, *options: str) -> int:
    base = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return int(pytest.main([*base, *tests], plugins=[plugin]))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def who_comes_by(files: Sequence[Path]) -> dict[str, Any]:
    """{"lines": {file: {line: tests}}, "times": {test: seconds}, "sources", "tests": {file:
    digest}}. Kept; files of tests that changed are run anew."""
    known: dict[str, Any] = {"lines": {}, "times": {}, "sources": {}, "tests": {}}
    if KEPT.exists():
        known = json.loads(KEPT.read_text())
    found = [f for pattern in PURE for f in sorted(ROOT.glob(pattern))]
    tests = {str(f.relative_to(ROOT)): digest(f) for f in found}
    changed = [name for name in tests if known["tests"].get(name) != tests[name]]
    if not changed:
        return known
    print(f"which test of {len(changed)} files comes by which line?", flush=True)
    kept = tests.keys() - set(changed)
    known["times"] = {t: s for t, s in known["times"].items() if t.partition("::")[0] in kept}
    for lines in known["lines"].values():
        for line, names in lines.items():
            lines[line] = [test for test in names if test in known["times"]]

    def work() -> int:
        plugin = Pure(str(f) for f in files)
        status = run_tests(changed, plugin)
        for file, lines in plugin.lines.items():
            for line, names in lines.items():
                those = [name for name in names if name not in plugin.failed]
                known["lines"].setdefault(file, {}).setdefault(str(line), []).extend(those)
        known["times"].update(plugin.times)
        known["failed"] = sorted(plugin.failed)
        known["tests"] = tests
        old = known["sources"] if len(changed) < len(tests) else {}  # whose lines others still say
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
        sys.meta_path.insert(0, Changed(mutant))
        return run_tests(tests, Pure(), "-x")

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
    every = [f for part in PARTS.values() for f in sorted(ROOT.glob(part))]
    patterns = [PARTS[part] for part in options.part or PARTS]
    files = options.file or [f for p in patterns for f in sorted(ROOT.glob(p))]
    found = [m for f in files for m in mutants(f.resolve().relative_to(ROOT))]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    known = who_comes_by(every)
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
