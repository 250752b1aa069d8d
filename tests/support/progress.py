"""Says which area of the tests runs and how far it is; a line names each failure at once.

An area is a folder of tests/. Lines are whole and in order, so that a log file reads as a terminal:

    [ 12%  0:41] autograd        102 of 102  100%
    [ 13%  0:44] fsdp             24 of 374    6%
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

PERIOD = 15.0  # seconds after which a line is due, though no area is done


def area_of(nodeid: str) -> str:
    """The folder of a test in tests/; "general" for a file that lies in none."""
    folders = nodeid.partition("::")[0].split("/")[1:-1]
    return folders[0] if folders else "general"


def reason(report: pytest.TestReport) -> str:
    """A line that says what went wrong; of ranks that failed, the first of them and its error."""
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    lines = [x.strip() for x in (text or str(report.longrepr)).strip().splitlines()] or [""]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]


class Progress:
    """A pytest plugin. A run of one area, or with ``-v``, keeps pytest's own output."""

    def __init__(self, reporter: Any) -> None:
        self.reporter = reporter
        self.total: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.results: dict[str, Counter[str]] = {}
        self.start = self.said = time.monotonic()
        self.on = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # none in the process that controls others: those collect
            self.begin(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.begin(ids)

    def begin(self, ids: Iterable[str]) -> None:
        self.total = Counter(map(area_of, ids))
        self.on = len(self.total) > 1 and self.reporter.verbosity <= 0
        if self.on:
            self.reporter.showfspath = False

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Iterator[None]:
        category, *shown = yield
        return (category, "", "") if self.on else (category, *shown)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.on:
            return
        area = area_of(report.nodeid)
        results = self.results.setdefault(area, Counter())
        if report.failed:
            results["failed"] += 1
            self.reporter.write_line(f"FAILED {report.nodeid} ({report.when}): {reason(report)}")
        elif report.skipped:
            results["skipped"] += 1
        if report.when != "teardown":
            return
        self.done[area] += 1
        if self.done[area] == self.total[area] or time.monotonic() > self.said + PERIOD:
            self.say(area)

    def say(self, area: str) -> None:
        self.said = time.monotonic()
        minutes, seconds = divmod(int(self.said - self.start), 60)
        whole = 100 * self.done.total() // self.total.total()
        done, total = self.done[area], self.total[area]
        results = self.results[area]
        tail = ", ".join(f"{results[k]} {k}" for k in ("failed", "skipped") if results[k])
        self.reporter.write_line(
            f"[{whole:3d}% {minutes:2d}:{seconds:02d}] {area:<12} {done:5d} of {total:<5d}"
            f"{100 * done // total:4d}%  {tail}".rstrip()
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.on = False  # the summary at the end is pytest's own
