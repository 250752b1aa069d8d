"""What a run takes of the suite without the C code."""

from __future__ import annotations

import pytest

from tests.support import part


def test_all_parts_together_are_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "EVERYTHING", True)
    names = {*part.files(16)}
    monkeypatch.setattr(part, "EVERYTHING", False)
    seen: set[str] = set()
    for n in range(200):
        monkeypatch.setattr(part, "PART", n)
        chosen = part.files(16)
        assert chosen == part.files(16) and len(chosen) < len(names) // 4
        assert "tests/dispatch/test_dispatch.py" in chosen
        seen |= {*chosen}
    assert seen == names


class Case:
    """What ``of_other_turns`` reads of a test item."""

    def __init__(self, number: int) -> None:
        self.nodeid, self.is_quick = f"test_a.py::test_a[{number}]", number % 3 == 0

    def get_closest_marker(self, name: str) -> bool | None:
        return self.is_quick or None


def test_five_turns_run_each_case_once_and_the_quick_ones_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [Case(number) for number in range(300)]
    monkeypatch.setattr(part, "SHARE", 1)
    assert not part.of_other_turns(cases)
    monkeypatch.setattr(part, "SHARE", 5)
    runs = []
    for turn in range(80, 85):
        monkeypatch.setattr(part, "TURN", turn)
        runs.append({*cases} - part.of_other_turns(cases))
    for case in cases:
        assert sum(case in run for run in runs) == (5 if case.is_quick else 1)
    assert max(map(len, runs)) < 160
