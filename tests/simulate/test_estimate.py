"""What a strategy is estimated to take, beside its simulation, over a grid of degrees."""

from __future__ import annotations

import itertools
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor.simulate import devices, simulate
from disttensor.simulate.estimate import Estimator
from disttensor.simulate.plan_strategy import Search
from tests.support.examples import ROOT, example
from tests.support.part import part

WORLD = 8
# A step is decided by arithmetic and by what is sent: on the fast network little waits, on the slow
# one most.
DEVICE = devices.Device(
    name="d", peak={torch.float32: 1e12}, bandwidth=1e12, launch=1e-9, memory=1e9, visit=1e-9,
    post=1e-9, gradient=1e-9,
)  # fmt: skip
NETWORKS = {
    name: devices.Network(ranks_per_node=WORLD, within=devices.Link(bandwidth, 1e-6))
    for name, bandwidth in (("fast", 1e11), ("slow", 2e9))
}


def build_with(strategy):
    """The example's GPT: attention over cp, a plan for tp, layers of different sizes for stages."""
    script = gpt_script()
    stages = strategy.visits()
    with torch.device("meta"):
        model = script.GPT(script.GPTConfig(256, 4, 256, 8, 64, False))
    strategy.apply(model, plan=script.PLAN, layers=script.LAYERS)
    script.init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(batch):
        inputs = dt.shard_tensor(batch[0], stages[0], strategy.batch())
        targets = dt.shard_tensor(batch[1], stages[-1], strategy.batch())
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def step():
        batch = torch.ones(2, 16, 64, dtype=torch.long)
        parts = zip(*(half.chunk(strategy.accumulate_steps) for half in batch), strict=True)
        dt.pipeline.run(loss, parts, strategy.schedule, stages=stages)
        optimizer.step()
        optimizer.zero_grad()

    return step


@cache
def gpt_script() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return example("train_gpt")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def grid() -> list[dt.Strategy]:
    """Degrees whose product is the world."""
    found = []
    for pp, dp, sharding, cp, tp in itertools.product((1, 2, 4, 8), repeat=5):
        if pp * dp * sharding * cp * tp == WORLD and pp <= 4 and tp <= 4:
            found += [
                dt.Strategy(
                    pp=pp, dp=dp, sharding=sharding, cp=cp, tp=tp, zero_stage=stage,
                    accumulate_steps=4 if pp > 1 else 1,
                )
                for stage in ((1, 2, 3) if sharding > 1 else (3,))
            ]  # fmt: skip
    return found


@cache
def searched(network: str) -> Search:
    return Search(
        build_with, WORLD, DEVICE, NETWORKS[network], 0.0, None, dt.Strategy(), 8, lambda _: None
    )


@cache
def probed(tp: int) -> Any:
    return searched("fast").estimator(tp).probe


ALWAYS = [
    (dt.Strategy(cp=8), "slow"), (dt.Strategy(tp=4, cp=2), "slow"),
    (dt.Strategy(pp=2, sharding=4, zero_stage=3, accumulate_steps=4), "slow"),
]  # fmt: skip
CASES = [*ALWAYS, *part([*itertools.product(grid(), NETWORKS)], 2)]


@pytest.mark.parametrize(("strategy", "network"), CASES, ids=str)
def test_an_estimate_is_within_a_fifth_of_the_simulation(strategy, network):
    estimate = Estimator(probed(strategy.tp or 1), WORLD, DEVICE, NETWORKS[network])
    report = simulate(lambda: build_with(strategy), WORLD, device=DEVICE, network=NETWORKS[network])
    found = estimate(strategy, frozenset())
    assert 0.8 < found.seconds / report.step_time < 1.2
    assert found.memory < 1.1 * report.fullest.peak_memory
