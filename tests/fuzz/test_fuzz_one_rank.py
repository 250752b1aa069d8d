"""Programs in which one rank does more than the others, of a few seeds.
``python -m tests.fuzz.fuzz_one_rank`` runs others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz import fuzz_changes, fuzz_one_rank
from tests.support import pool
from tests.support.part import seeds

ACTING = {2: 15, 4: 8}  # seeds, in a world of this size
CHANGED = {2: 60, 4: 20}


def reports(fuzzer: Any, count: int, world: int) -> str:
    """Returns the reports of ``count`` seeds."""
    cases = [fuzzer.make(seed, world) for seed in seeds(count)]
    return "\n".join(pool.run_on_ranks(world, fuzzer.run, cases, timeout=150)[0])


@pytest.mark.limit(200)
@pytest.mark.parametrize("world", ACTING)
def test_acts_of_one_rank_change_nothing(world: int) -> None:
    found = reports(fuzz_one_rank, ACTING[world], world)
    assert not found, "\n" + found


@pytest.mark.limit(200)
@pytest.mark.parametrize("world", CHANGED)
def test_changes_of_a_source_are_those_of_one_process(world: int) -> None:
    found = reports(fuzz_changes, CHANGED[world], world)
    assert not found, "\n" + found


def test_a_mark_of_one_rank_is_found() -> None:
    """A read that marks the tensor on one rank, and a value that one rank reduces again."""
    lines = (
        "v1 = leaf(1, (4, 3), 'S0')", "v2 = v1.sum(0)", "v3 = v2.relu()", "act('write', v2)",
        "v4 = v2.sigmoid()", "loss = (v3 * v4).sum()",
    )  # fmt: skip
    case = fuzz_one_rank.Case(fuzz_one_rank.Program(lines), 0, (2,))
    with pytest.raises((AssertionError, pool.RanksFailed)):
        assert not pool.run_on_ranks(2, written_by_one_rank, case, timeout=60)[0]
    pool.stop(2)


def written_by_one_rank(case):
    """The reports where an act is no reading, but a write to the local of one rank."""
    fuzz_one_rank.ACTS["write"] = lambda scene, x: x.local.detach().add_(1)
    return fuzz_one_rank.run([case])
