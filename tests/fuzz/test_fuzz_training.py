"""Training set-ups of a few seeds, and those that were wrong once, on real ranks.
``python -m tests.fuzz.fuzz_training`` runs others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tests.fuzz import fuzz_compiled_training, fuzz_training
from tests.fuzz.training_setups import Setup, make
from tests.support import pool
from tests.support.part import part, seeds

COUNT = {2: 6, 4: 3}  # seeds, in a world of this size
COMPILED = 2  # seeds, on 2 ranks
# A weight that a layer of another stage reads, in a segment that begins and ends often
SHARED = [
    # a stage brought a shard of a shared weight, which the other stage sent whole
    Setup(
        440, (2, 1, 2, 1, 1), "mlp", "SGD momentum", rows=9, parts=4, schedule="interleaved_1f1b",
        stage=3, segment_mb=0.001, tied=True, unused=True,
    ),
    # the same, while the stage waited for what the layer is given
    Setup(
        672, (2, 1, 2, 1, 1), "conv", "SGD momentum", rows=9, parts=4,
        schedule="interleaved_1f1b", stage=1, segment_mb=0.001, tied=True, amp="bf16",
    ),
]  # fmt: skip
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
    *SHARED,
    # layers were computed again while their segment showed shards, or without a borrowed weight
    Setup(
        440, (2, 1, 2, 1, 1), "mlp", "SGD momentum", rows=9, parts=4, schedule="gpipe", stage=1,
        tied=True, amp="bf16", recompute=True,
    ),
    Setup(
        441, (2, 1, 1, 1, 1), "gpt", "SGD momentum", rows=9, parts=4, schedule="1f1b", tied=True,
        recompute=True,
    ),
]  # fmt: skip


def sweep() -> list[Setup]:
    schedules = "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"
    drawn = itertools.product(SHARED, schedules, (1, 3), (None, "bf16"), (False, True))
    return [
        replace(one, schedule=schedule, stage=stage, amp=amp, recompute=recompute)
        for one, schedule, stage, amp, recompute in drawn
        if not (recompute and one.kind == "conv")  # see ``make``
    ]


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("world", COUNT)
def test_set_ups_train_as_one_process(world: int) -> None:
    setups = [make(seed, world) for seed in seeds(COUNT[world])]
    reports = pool.run_on_ranks(world, fuzz_training.run, setups, timeout=200)[0]
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_compiled_set_ups_train_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "warning_filters", ["ignore"])  # those of Dynamo
    setups = [make(seed, 2) for seed in seeds(COMPILED)]
    reports = pool.run_on_ranks(2, fuzz_compiled_training.checked, setups, timeout=250)[0]
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.parametrize("setup", WRONG_ONCE, ids=str)
def test_what_was_wrong_once(setup: Setup) -> None:
    world = math.prod(setup.degrees)
    reports = pool.run_on_ranks(world, fuzz_training.run, [setup], timeout=100)[0]
    assert not reports, "\n".join(reports)


@pytest.mark.slow
@pytest.mark.parametrize("setup", part(sweep(), 2), ids=str)
def test_a_weight_of_two_stages(setup: Setup) -> None:
    reports = pool.run_on_ranks(4, fuzz_training.run, [setup], timeout=100)[0]
    assert not reports, "\n".join(reports)
