"""What a commit runs of tests that are many: another part for each; ``EVERYTHING=1`` runs all."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = bool(os.environ.get("EVERYTHING"))


@functools.cache
def commit() -> str:
    """The hash of the checked-out commit; "" where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def part(items: Collection[Any], count: int, salt: object = "") -> list[Any]:
    """``count`` of the items, in their order. All workers of a session choose the same ones."""
    numbers = range(len(items))
    if not EVERYTHING and count < len(items):
        numbers = sorted(random.Random(f"{commit()} {salt}").sample(numbers, count))
    every = list(items)
    return [every[i] for i in numbers]


@functools.cache
def _files() -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py"))


def files(share: int) -> list[str]:
    """One in ``share`` of the test files, and those of the dispatcher."""
    names = _files()
    always = [name for name in names if name.startswith("tests/dispatch/")]
    return [*always, *part([*filter(lambda n: n not in always, names)], len(names) // share)]


if __name__ == "__main__":
    print(*files(int(sys.argv[1])), sep="\n")
