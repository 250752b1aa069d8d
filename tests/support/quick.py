"""Chooses the tests that ``make test`` runs: the mark ``quick``. ``make test-all`` runs all tests.

The candidates are chosen by rule, for each test function:

- A function is left out if a case of it takes more than ``LONG`` seconds, or if it has the mark
  ``slow`` and no record.
- Each file keeps its shortest function, if a case of it takes at most ``LONGEST`` seconds.
- A test with the mark ``feature`` is kept: the main test of a row of docs/features.md.
- Of a function with many cases, the first and the last are kept; the first alone if it is in
  ``seconds.txt``.

The quick tests are the candidates without the cases in ``repeats.txt``, whose lines other quick
tests run. ``make seconds`` runs all tests and writes ``seconds.txt``, with the functions of which a
case takes a second or more. ``make choose`` runs the candidates and writes ``repeats.txt``
(``choose.py``). A new test is in neither file, and is quick.
"""

from __future__ import annotations

import ast
import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("seconds.txt")
REPEATS = Path(__file__).with_name("repeats.txt")
LONG = 1.0  # seconds of a case
LONGEST = 10.0  # seconds of a case of a file's shortest function
HEAD = (
    "# Seconds of a case, on one of two quiet cores, where it takes one or more. From: make seconds"
)


@functools.cache
def recorded() -> dict[str, float]:
    """The seconds of a case, by "tests/file.py::function"."""
    lines = [line.split() for line in TABLE.read_text().splitlines() if line[:1] != "#"]
    return {name: float(seconds) for seconds, name in lines}


@functools.cache
def repeats() -> frozenset[str]:
    """The candidates that are left out: "first tests/file.py::function", or "last"."""
    return frozenset(line for line in REPEATS.read_text().splitlines() if line[:1] != "#")


def candidates(
    functions: Iterable[str], features: Iterable[str], slow: Collection[str] = ()
) -> set[str]:
    """The functions of all files, "tests/file.py::function", of which cases are candidates."""
    files = defaultdict(list)
    for name in functions:
        files[name.partition("::")[0]].append(name)
    kept = set(features)
    for names in files.values():
        seconds = {name: recorded().get(name, 10.0 if name in slow else 0.0) for name in names}
        shortest = min(names, key=seconds.__getitem__)
        kept |= {shortest} if seconds[shortest] <= LONGEST else set()
        kept |= {name for name in names if seconds[name] <= LONG}
    return kept


def mark_quick(items: Iterable[pytest.Item]) -> None:
    """Gives the mark ``candidate``, and ``quick`` to those of the items that ``make test``
    runs."""
    cases = defaultdict(list)
    features, slow = set(), set()
    for item in items:
        file = item.nodeid.partition("::")[0]
        name = f"{file}::{getattr(item, 'originalname', item.name)}"
        cases[name].append(item)
        if item.get_closest_marker("feature"):
            features.add(name)
        if item.get_closest_marker("slow"):
            slow.add(name)
    for name in candidates(cases, features, slow):
        ends = {"last": cases[name][-1], "first": cases[name][0]}
        if name in recorded() or ends["first"] is ends["last"]:
            del ends["last"]
        for place, item in ends.items():
            item.add_marker(pytest.mark.candidate(f"{place} {name}"))
            if f"{place} {name}" not in repeats():
                item.add_marker("quick")


def longest_first(items: list[pytest.Item]) -> None:
    """Moves files with a very long test to the front: one worker would wait for it at the end."""
    files = {name.partition("::")[0] for name, seconds in recorded().items() if seconds > 5}
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in files)


def functions_of(file: Path) -> dict[str, str]:
    """The test functions of a file as "tests/file.py::function": the feature that each tests."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [d for d in node.decorator_list if isinstance(d, ast.Call)]
            names = [ast.literal_eval(m.args[0]) for m in marks if "feature" in ast.unparse(m.func)]
            found[f"{file.relative_to(ROOT)}::{node.name}"] = names[0] if names else ""
    return found


def table_of(report: Path) -> str:
    """The table, from pytest's report in XML. The median of the cases counts: the first may have
    started the ranks of others too."""
    seconds = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        function = case.attrib["name"].partition("[")[0]
        seconds[f"{file}::{function}"].append(float(case.attrib["time"]))
    medians = {name: statistics.median(cases) for name, cases in seconds.items()}
    lines = [f"{s:5.1f} {name}" for name, s in sorted(medians.items()) if s >= 1]
    return "\n".join([HEAD, *lines, ""])


if __name__ == "__main__":
    TABLE.write_text(table_of(Path(sys.argv[1])))
