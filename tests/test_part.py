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
