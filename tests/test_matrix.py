"""``make matrix``: where it runs, what it says, and what it writes. Nothing is installed here, and
no suite runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests import environments, matrix
from tests.matrix import Result

NEWEST, OLDEST = environments.torches()[0], environments.pythons()[0]
PAGE = """before
<!-- the table of the matrix -->
| torch | Python | passed | skipped | failed | minutes | commit | date |
| --- | --- | --: | --: | --: | --: | --- | --- |
| 2.13.0 | 3.11 | 5 | 0 | 0 | 12 | aaaaaaa | 2026-01-01 |
| 2.13.0 | 3.9 | 4 | 0 | 0 | 12 | aaaaaaa | 2026-01-01 |
<!-- its end -->
after
"""


def cells(torch: list[str] | None = None, python: list[str] | None = None) -> list[tuple[str, str]]:
    return matrix.cells(argparse.Namespace(torch=torch, python=python))


def test_every_torch_runs_once_and_every_python() -> None:
    every = cells()
    assert every[0] == (NEWEST, OLDEST)
    assert len(set(every)) == len(every) == len(environments.torches()) + 3
    assert {t for t, _ in every} == set(environments.torches())
    assert {p for _, p in every} == set(environments.pythons()) == {"3.11", "3.12", "3.13", "3.14"}


def test_the_other_end_of_a_choice_is_the_newest_torch_and_the_oldest_python() -> None:
    assert cells(torch=["2.13.0"]) == [("2.13.0", OLDEST)]
    assert cells(python=["3.13"]) == [(NEWEST, "3.13")]
    assert cells(torch=["newest"], python=["3.12", "3.13"]) == [(NEWEST, "3.12"), (NEWEST, "3.13")]


@pytest.mark.parametrize(
    ("options", "outcome", "status"),
    [
        ([], Result("", "", passed=3), 0),
        ([], Result("", "", passed=3, failed=1), 1),
        ([], environments.NoInterpreterError("no Python"), 0),
        ([], environments.UnavailableError("no room"), 1),
        (["--if-possible"], environments.UnavailableError("no room"), 0),
    ],
)
def test_what_is_a_failure(options, outcome, status, monkeypatch, capsys) -> None:
    def run(torch: str, python: str, rest: list[str]) -> Result:
        assert rest == ["-k", "pipeline"]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr("sys.argv", ["matrix", "--torch", NEWEST, *options, "-k", "pipeline"])
    assert matrix.main() == status
    if isinstance(outcome, Exception):
        assert f"skipped: {outcome}" in capsys.readouterr().out


def test_a_run_replaces_its_row_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    unavailable = Result("2.13.0", "3.9", note="skipped: there is no Python 3.9 here")
    matrix.write(
        page, [Result("2.13.0", "3.11", 7, 2, 1, 3.0), Result("2.9.1", "3.11", 1), unavailable]
    )
    before, header, rule, *rows, end, after = (
        page.read_text().splitlines()[:1] + page.read_text().splitlines()[2:]
    )
    assert (before, after) == ("before", "after") and end == "<!-- its end -->"
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| 2.13.0", "3.11", "7"],
        ["| 2.13.0", "3.9", "4"],
        ["| 2.9.1", "3.11", "1"],
    ]
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1


def test_environments_lie_where_the_variables_say(monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.delenv("DISTTENSOR_ENVIRONMENTS", raising=False)
    assert environments.folder() == Path("/c/disttensor/environments")
    monkeypatch.setenv("DISTTENSOR_ENVIRONMENTS", "/e")
    assert environments.folder() == Path("/e")


def test_an_environment_is_made_once_and_again_when_the_pins_change(monkeypatch, tmp_path) -> None:
    made = []
    monkeypatch.setenv("DISTTENSOR_ENVIRONMENTS", str(tmp_path))
    monkeypatch.setattr(environments, "_install", lambda home, python: made.append(home.name))
    for _ in range(2):
        python = environments.environment(NEWEST, OLDEST)
    assert made == [f"torch-{NEWEST}-python-{OLDEST}"] and python.parent.parent.name == made[0]
    pinned = (python.parent.parent / "installed.txt").read_text().splitlines()
    assert f"torch=={NEWEST}" in pinned and sum(pin[:7] == "torch==" for pin in pinned) == 1
    monkeypatch.setattr(environments, "pins", lambda file: ["numpy==1"])
    environments.environment(NEWEST, OLDEST)
    assert len(made) == 2


def test_a_python_that_does_not_run_is_not_taken(monkeypatch, tmp_path) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 3.12\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(environments.NoInterpreterError, match=r"no Python 3\.12 here"):
        environments.interpreter("3.12")
    other = tmp_path / "versions" / "3.12.7" / "bin" / "python3.12"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\necho 3.12\n")
    other.chmod(0o755)
    assert environments.interpreter("3.12") == other
