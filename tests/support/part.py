"""What a run takes of tests that are many: the part 0, or the part of a number, as ``PART=17``;
``EVERYTHING=1`` runs all. ``SWEEP=17`` is another part of the sweeps alone: CI runs another one for
each commit.

    @pytest.mark.sweep(3)  # a run takes a third of the cases, with each value of each parameter
    @pytest.mark.parametrize(...)
    def test_every_combination(...): ...
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = bool(os.environ.get("EVERYTHING"))
PART = int(os.environ.get("PART", "0"))
SWEEP = int(os.environ.get("SWEEP", PART))


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


def left_out(items: Collection[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of functions with the mark ``sweep`` that this run does not take."""
    sweeps = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    return {
        case for name, cases in sweeps.items() for case in {*cases}.difference(_sample(cases, name))
    }


def _sample(cases: list[Any], salt: str) -> list[Any]:
    """Returns one in n of the cases, and as many more as hold each value of each parameter once."""
    if EVERYTHING:
        return cases
    seen: set[tuple[str, int]] = set()
    first, others = [], []
    for case in random.Random(f"{SWEEP} {salt}").sample(cases, len(cases)):
        values = {(name, id(value)) for name, value in case.callspec.params.items()}
        (others if values <= seen else first).append(case)
        seen |= values
    (share,) = cases[0].get_closest_marker("sweep").args
    return [*first, *others][: max(len(first), -(-len(cases) // share))]


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
