"""What ``make test`` runs: a part of each file, each row of docs/features.md, in bounded time."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tests.support.quick import (
    BRIEF,
    HEAD,
    LONG,
    LONGEST,
    ROOT,
    functions_of,
    quick_functions,
    recorded,
    table_of,
)

BUDGET = 440.0  # seconds of one worker; two share them
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@functools.cache
def functions() -> dict[str, str]:
    """The feature that each test function of all files tests, "" for most."""
    return {name: feature for file in FILES for name, feature in functions_of(file).items()}


def quick() -> set[str]:
    names = functions()
    return quick_functions(names, [name for name in names if names[name]])


def test_each_file_has_a_quick_test_but_two_that_take_long() -> None:
    files = {str(file.relative_to(ROOT)) for file in FILES}
    long = {"tests/opinfo/test_operators.py", "tests/test_typing.py"}
    assert {name.partition("::")[0] for name in quick()} == files - long


def test_each_feature_of_the_page_has_one_main_test() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    table = text[text.index("# Features") : text.index("## A program with placements")]
    rows = re.findall(r"^\| \*\*(.*?)\*\*", table, flags=re.MULTILINE)
    assert sorted(filter(None, functions().values())) == sorted(rows)


def test_quick_tests_keep_the_budget() -> None:
    assert sum(recorded().get(name, BRIEF) for name in quick()) < BUDGET


def test_recorded_functions_exist() -> None:
    gone = recorded().keys() - functions().keys()
    assert not gone, f"rename or delete these lines of tests/support/seconds.txt: {sorted(gone)}"


def test_long_functions_are_left_out_unless_a_file_or_a_feature_needs_them() -> None:
    names = [name for name, seconds in recorded().items() if seconds > LONG]
    short = next(name for name in functions() if name not in recorded())
    long = next(n for n in names if not functions()[n] and recorded()[n] <= LONGEST)
    longest = next(name for name in names if recorded()[name] > LONGEST)
    file = long.partition("::")[0]
    assert quick_functions([long, f"{file}::test_short"], []) == {f"{file}::test_short"}
    assert quick_functions([long], []) == {long}
    assert quick_functions([longest], []) == set() and quick_functions([], [longest]) == {longest}
    new, other = f"{file}::test_new", f"{file}::test_other"
    assert quick_functions([new, other], [], slow=[new]) == {other}
    assert quick_functions([long, f"{file}::test_short", short], [long]) >= {long, short}


def test_the_table_holds_the_median_of_the_cases_of_long_functions(tmp_path: Path) -> None:
    cases = [("test_a[0]", 9), ("test_a[1]", 2), ("test_a[2]", 1), ("test_b", 0.5)]
    text = "".join(
        f'<testcase classname="tests.x.test_y" name="{n}" time="{s}"/>' for n, s in cases
    )
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    assert table_of(report) == f"{HEAD}\n  2.0 tests/x/test_y.py::test_a\n"
