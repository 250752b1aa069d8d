"""What a commit runs of the suite without the C code: another part for each."""

from __future__ import annotations

import pytest

from tests.support import part


def test_parts_of_several_commits_are_all_files_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "EVERYTHING", True)
    names = {*part.files(16)}
    monkeypatch.setattr(part, "EVERYTHING", False)
    seen: set[str] = set()
    for n in range(200):
        monkeypatch.setattr(part, "commit", lambda n=n: f"commit {n}")
        chosen = part.files(16)
        assert chosen == part.files(16) and len(chosen) < len(names) // 4
        assert "tests/dispatch/test_dispatch.py" in chosen
        seen |= {*chosen}
    assert seen == names
