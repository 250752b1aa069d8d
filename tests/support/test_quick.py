"""What ``make test`` runs: a part of each file, each row of docs/features.md, in bounded time."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tests.support.choose import Case, chosen, killers
from tests.support.quick import (
    HEAD,
    LONG,
    LONGEST,
    ROOT,
    candidates,
    functions_of,
    recorded,
    repeats,
    table_of,
)

BUDGET = 400.0  # seconds of one worker, for the functions that take one or more; two share them
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@functools.cache
def functions() -> dict[str, str]:
    """The feature that each test function of all files tests, "" for most."""
    return {name: feature for file in FILES for name, feature in functions_of(file).items()}


def quick() -> set[str]:
    names = functions()
    found = candidates(names, [name for name in names if names[name]])
    return {f for f in found if f"first {f}" not in repeats()}


def test_each_file_has_a_quick_test_but_a_few_that_take_long() -> None:
    files = {str(file.relative_to(ROOT)) for file in FILES}
    long = files - {name.partition("::")[0] for name in quick()}
    assert len(long) <= 20, sorted(long)


def test_each_feature_of_the_page_has_one_main_test() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    table = text[text.index("# Features") : text.index("## A program with placements")]
    rows = re.findall(r"^\| \*\*(.*?)\*\*", table, flags=re.MULTILINE)
    assert sorted(filter(None, functions().values())) == sorted(rows)


def test_quick_tests_keep_the_budget() -> None:
    assert sum(recorded().get(name, 0.0) for name in quick()) < BUDGET


def test_recorded_functions_exist() -> None:
    gone = recorded().keys() - functions().keys()
    assert not gone, f"rename or delete these lines of tests/support/seconds.txt: {sorted(gone)}"
    gone = {*killers()} - functions().keys()
    assert not gone, f"rename or delete these lines of tests/support/killers.txt: {sorted(gone)}"
    gone = {name.partition(" ")[2] for name in repeats()} - functions().keys()
    assert not gone, f"rename or delete these lines of tests/support/repeats.txt: {sorted(gone)}"


def test_cases_are_chosen_by_the_lines_that_they_add_in_a_second() -> None:
    short, long = Case("first a.py::short", 1.0, [1, 2, 3]), Case("last a.py::long", 9.0, [1, 2])
    twice, alone = Case("first a.py::twice", 1.0, [3]), Case("first b.py::alone", 5.0, [1])
    every = [twice, long, short, alone]
    assert chosen(every, [], 1.0) == {short.name, alone.name}  # each file keeps a case
    assert chosen(every, [], 0.2) == {short.name, twice.name, alone.name}
    assert chosen(every, ["a.py::long"], 0.5) == {long.name, short.name, alone.name}


def test_long_functions_are_left_out_unless_a_file_or_a_feature_needs_them() -> None:
    names = [name for name, seconds in recorded().items() if seconds > LONG]
    short = next(name for name in functions() if name not in recorded())
    long = next(n for n in names if not functions()[n] and recorded()[n] <= LONGEST)
    longest = next(name for name in names if recorded()[name] > LONGEST)
    file = long.partition("::")[0]
    assert candidates([long, f"{file}::test_short"], []) == {f"{file}::test_short"}
    assert candidates([long], []) == {long}
    assert candidates([longest], []) == set() and candidates([], [longest]) == {longest}
    new, other = f"{file}::test_new", f"{file}::test_other"
    assert candidates([new, other], [], slow=[new]) == {other}
    assert candidates([long, f"{file}::test_short", short], [long]) >= {long, short}


def test_the_table_holds_the_median_of_the_cases_of_long_functions(tmp_path: Path) -> None:
    cases = [("test_a[0]", 9), ("test_a[1]", 2), ("test_a[2]", 1), ("test_b", 0.5)]
    text = "".join(
        f'<testcase classname="tests.x.test_y" name="{n}" time="{s}"/>' for n, s in cases
    )
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    assert table_of(report) == f"{HEAD}\n  2.0 tests/x/test_y.py::test_a\n"
