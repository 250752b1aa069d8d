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
    """What ``left_out`` reads of a test item."""

    def __init__(self, function: str, x: int, y: int, *share: int) -> None:
        self.nodeid = f"test_a.py::{function}[{x}-{y}]"
        self.mark = pytest.mark.sweep(*share).mark if share else None
        self.callspec = self
        self.params = {"x": x, "y": y}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark


def test_each_part_of_a_sweep_has_each_value_and_all_parts_have_all_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part, "EVERYTHING", False)
    others = [Case("test_b", n, 0) for n in range(5)]
    cases = [Case("test_a", x, y, 3) for x in range(10) for y in range(3)]
    seen: set[Case] = set()
    for n in range(40):
        monkeypatch.setattr(part, "SWEEP", n)
        out = part.left_out([*others, *cases])
        assert out == part.left_out([*others, *cases]) and not out & {*others}
        taken = {*cases} - out
        assert 10 <= len(taken) <= 12
        assert {c.params["x"] for c in taken} == {*range(10)}
        assert {c.params["y"] for c in taken} == {*range(3)}
        seen |= taken
    assert seen == {*cases}
    assert not part.left_out(cases[:1])  # which was named
    monkeypatch.setattr(part, "EVERYTHING", True)
    assert not part.left_out(cases)
