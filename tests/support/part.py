"""What a run takes of tests that are many: the part 0, or the part of a number, as ``PART=17``;
``EVERYTHING=1`` runs all. CI runs the quick tests and one in ``SHARE`` of the other ones, which the
commit chooses (``TURN``).
"""

from __future__ import annotations

import functools
import os
import random
import sys
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = bool(os.environ.get("EVERYTHING"))
PART = int(os.environ.get("PART", "0"))
SHARE = 1 if EVERYTHING else int(os.environ.get("SHARE", "1"))
TURN = int(os.environ.get("TURN", "0"))


def part(items: Collection[Any], count: int, salt: object = "") -> list[Any]:
    """``count`` of the items, in their order. All workers of a session choose the same ones."""
    numbers = range(len(items))
    if not EVERYTHING and count < len(items):
        numbers = sorted(random.Random(f"{PART} {salt}").sample(numbers, count))
    every = list(items)
    return [every[i] for i in numbers]


def seeds(count: int) -> range:
    """``count`` seeds of a fuzzer, others in each part."""
    return range(PART * count, (PART + 1) * count)


def of_other_turns(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases that this run leaves to runs of the other ``SHARE`` - 1 turns."""
    return {
        item
        for item in items
        if (zlib.crc32(item.nodeid.encode()) - TURN) % SHARE
        and item.get_closest_marker("quick") is None
    }


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
