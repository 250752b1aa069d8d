"""The suite on every torch and Python that is tested, one environment after the other, with a table
at the end.

    python3 -m tests.matrix                                 every torch on the oldest Python,
                                                            the newest on the others
    python3 -m tests.matrix --torch 2.15.0 -k pipeline      one torch; other options are pytest's
    python3 -m tests.matrix --python 3.13 --torch newest
    python3 -m tests.matrix --quick --torch newest          import, examples, a part of the suite
    python3 -m tests.matrix --markdown docs/versions.md     writes whole runs into that page

Needs nothing but the standard library; ``tests/environments.py`` makes the environments.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.environments import (
    ROOT,
    NoInterpreterError,
    UnavailableError,
    environment,
    pythons,
    torches,
)

# Import, examples, the pages' programs, and what lies closest to torch's own code.
QUICK = (
    "test_versions",
    "test_imports",
    "test_public",
    "test_docs",
    "test_errors",
    "test_interop",
    "dispatch/test_dispatch",
    "comm/test_collectives",
)
BEGIN, END = "<!-- the table of the matrix -->", "<!-- its end -->"
COLUMNS = ["torch", "Python", "passed", "skipped", "failed", "minutes", "commit", "date"]


@dataclass(frozen=True)
class Result:
    torch: str
    python: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    minutes: float = 0.0
    note: str = ""  # why there are no numbers

    def cells(self) -> list[str]:
        if self.note:
            return [self.torch, self.python, "-", "-", "-", "-", "", self.note]
        counts = [self.passed, self.skipped, self.failed]
        return [self.torch, self.python, *map(str, counts), f"{self.minutes:.0f}", *_state()]


def run(torch: str, python: str, options: list[str]) -> Result:
    """pytest on the checkout, in the environment of this torch and Python."""
    interpreter = environment(torch, python)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # the C code, where this Python has a compiler; each has a file of its own
    subprocess.run([str(interpreter), "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(interpreter), "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"]
        status = subprocess.run([*command, *options], cwd=ROOT, env=variables).returncode
        minutes = (time.monotonic() - start) / 60
        if not report.exists():
            return Result(torch, python, failed=1, note=f"pytest ended with {status}")
        suite = ElementTree.parse(report).getroot()[0].attrib
    skipped, failed = int(suite["skipped"]), int(suite["failures"]) + int(suite["errors"])
    passed = int(suite["tests"]) - skipped - failed
    return Result(torch, python, passed, skipped, failed or int(status != 0), minutes)


def cells(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(torch, Python) in the order in which they run."""
    if args.torch or args.python:
        wanted = [torches()[0] if t == "newest" else t for t in args.torch or ["newest"]]
        return [(t, p) for t in wanted for p in args.python or pythons()[:1]]
    every = [(t, pythons()[0]) for t in torches()]
    return every[:1] + [(torches()[0], p) for p in pythons()[1:]] + every[1:]


def table(rows: list[list[str]]) -> str:
    lines = [COLUMNS, ["---", "---", *["--:"] * 4, "---", "---"], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(page: Path, results: list[Result]) -> None:
    """The rows of ``results`` into the page's table; the others stay as they are."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = [line.strip("| ").split(" | ") for line in old.splitlines() if line[2:3].isdigit()]
    rows = {(row[0], row[1]): row for row in [*lines, *(r.cells() for r in results if not r.note)]}
    ordered = [rows[key] for key in sorted(rows, key=lambda k: (_parts(k[0]), _parts(k[1])))]
    page.write_text(f"{before}{BEGIN}\n{table(ordered[::-1])}\n{END}{after}", encoding="utf-8")


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _state() -> list[str]:
    """The commit, marked where the code of the checkout differs from it, and the date."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = " + changes" if git("status", "--porcelain", "--", "*.py") else ""
    return [git("rev-parse", "--short", "HEAD") + changed, f"{datetime.date.today()}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    known = [*torches(), "newest"]
    parser.add_argument("--torch", action="append", choices=known, help="may be repeated")
    parser.add_argument("--python", action="append", choices=pythons(), help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="a part of about two minutes")
    parser.add_argument(
        "--if-possible", action="store_true", help="what cannot be installed is no failure"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    args, options = parser.parse_known_args()
    if args.markdown and (options or args.quick):
        parser.error("--markdown is for the whole suite: leave out --quick and pytest's options")
    if args.quick:
        options += ["-m", "not slow", *(f"tests/{name}.py" for name in QUICK)]
    results, failed = [], False
    for torch, python in cells(args):
        print(f"torch {torch}, Python {python}:", flush=True)
        try:
            result = run(torch, python, options)
        except UnavailableError as error:
            result = Result(torch, python, note=f"skipped: {error}")
            failed |= not (args.if_possible or isinstance(error, NoInterpreterError))
        failed |= result.failed > 0
        results.append(result)
        print("  ".join(filter(None, result.cells())), flush=True)
        if args.markdown:
            write(args.markdown, results)
    print("\n" + table([result.cells() for result in results]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
