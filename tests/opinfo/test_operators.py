"""docs/operators.md is what the rules say."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operators.md"
TORCH = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH}."),
    reason=f"the page lists the functions of torch {TORCH}; each torch has some more, or fewer",
)
@pytest.mark.limit(300)
def test_the_page_of_operators_is_fresh() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.opinfo.operators"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    new, old = done.stdout.splitlines(), PAGE.read_text().splitlines()
    changes = list(difflib.unified_diff(old, new, "docs/operators.md", "now", lineterm="", n=0))
    assert not changes, "run `make operators`:\n" + "\n".join(changes[:40])
