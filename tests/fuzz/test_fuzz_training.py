"""Training set-ups of this commit's seeds, and those that were wrong once, on real ranks.
``python -m tests.fuzz.fuzz_training`` runs others."""

from __future__ import annotations

import math

import pytest

from tests.fuzz import fuzz_training
from tests.fuzz.training_setups import Setup, make
from tests.opinfo.test_opinfo import commit
from tests.support import pool

COUNT = {2: 12, 4: 8}  # of a commit, in a world of this size
WRONG_ONCE = [
    # layers without parameters were taken for segments
    Setup(45, (2, 1, 1, 1, 1), "mlp", "SGD", rows=5, parts=2, schedule="1f1b"),
    # a batch of one row is not split: what its gradients reached was not noticed
    Setup(167, (1, 2, 1, 1, 1), "conv", "SGD", rows=5, parts=3),
    # gradients arrive in another order where a piece is empty
    Setup(121, (2, 2, 1, 1, 1), "conv", "SGD", rows=5, parts=3, schedule="1f1b", tied=True),
    # a layer was computed again with the shard of a weight that it shares
    Setup(
        292, (2, 1, 2, 1, 1), "mlp", "SGD", rows=8, parts=4, schedule="1f1b", stage=3, tied=True,
        recompute=True,
    ),
    # a segment was taken for left before its first layer, whose input needs no gradient, had run
    Setup(73, (1, 1, 2, 1, 2), "conv", "SGD", rows=8, stage=3, segment_mb=0.001, amp="bf16"),
    # a rank with nothing did not compute a region again
    Setup(
        448, (1, 2, 2, 1, 1), "conv", "SGD", rows=5, parts=3, stage=3, segment_mb=0.001, tied=True,
        recompute=True,
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("world", COUNT)
def test_set_ups_train_as_one_process(world: int) -> None:
    first = int(commit()[-4:] or "0", 16) * COUNT[world]
    setups = [make(seed, world) for seed in range(first, first + COUNT[world])]
    reports = pool.run_on_ranks(world, fuzz_training.run, setups, timeout=200)[0]
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.parametrize("setup", WRONG_ONCE, ids=str)
def test_what_was_wrong_once(setup: Setup) -> None:
    world = math.prod(setup.degrees)
    reports = pool.run_on_ranks(world, fuzz_training.run, [setup], timeout=100)[0]
    assert not reports, "\n".join(reports)
