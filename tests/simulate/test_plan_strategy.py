"""``dt.plan_strategy``: simulated strategies, sorted by time, and why the others lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.plan_strategy import strategies

WORLD, WIDTH = 4, 256
# A step is decided by arithmetic, and by what is sent.
DEVICE = dt.devices.Device(
    name="d", peak={torch.float32: 1e12}, bandwidth=1e12, launch=1e-9, memory=1e9
)
NETWORK = dt.devices.Network(ranks_per_node=4, within=dt.devices.Link(1e11, 1e-6))


def build_with(strategy):
    """Two layers, as a pair over tp."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    plan = {f"{i}.weight": {"tp": dt.Shard(i)} for i in range(2)}
    strategy.apply(model, plan=plan)
    for weight in model.parameters():
        nn.init.normal_(weight)
    stages, optimizer = strategy.stages(), torch.optim.AdamW(model.parameters())

    def loss(rows):
        x = dt.shard_tensor(rows, stages[0], strategy.batch(sequence=None))
        return model(x).square().mean()

    def step():
        rows = torch.ones(1024, WIDTH).chunk(strategy.accumulate_steps)
        dt.pipeline.run(loss, rows, stages=stages)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plan(candidates, **more):
    return dt.plan_strategy(build_with, WORLD, candidates, device=DEVICE, network=NETWORK, **more)


def test_the_fastest_is_the_best_and_the_others_say_why_they_lost():
    staged, split, replicas = dt.Strategy(pp=2, dp=2), dt.Strategy(tp=4), dt.Strategy(dp=4)
    table = plan([staged, split, replicas])
    times = [c.report.step_time for c in table.candidates]
    assert times == sorted(times) and len(set(times)) == 3
    assert table.best == replicas == table.candidates[0].strategy
    reasons = {c.strategy: c.reason for c in table.candidates}
    assert reasons[replicas] == "" and reasons[staged].startswith("bubble 5")
    assert reasons[split].startswith("collectives")
    head, first, *_ = str(table).splitlines()
    assert first.startswith("dp=4") and head.split()[:2] == ["strategy", "step"]


def test_what_does_not_fit_and_what_is_refused_lose_with_the_reason():
    small, large = dt.Strategy(sharding=4, zero_stage=3), dt.Strategy(dp=4)
    table = plan([large, dt.Strategy(tp=3), small], memory=4 << 20)  # replicas hold 4.25 MiB
    assert table.best == small
    over, refused = table.candidates[1:]
    assert over.strategy == large and over.reason.endswith(" over") and not over.fits
    assert refused.reason.startswith("ValueError: ") and refused.report is None
    assert "tp=3" in str(table)
    with pytest.raises(SimulationError, match=r"none of 1 strategies runs on 4 ranks.*tp=3"):
        plan([dt.Strategy(tp=3)]).best  # noqa: B018


def test_what_computes_longer_than_the_best_takes_is_not_simulated_further():
    slow = dt.Strategy(pp=1, dp=1, tp=1, cp=4)  # all ranks compute everything
    table = plan([dt.Strategy(dp=4), slow])
    assert table.candidates[1].reason.startswith("computes for")
    assert [k.ranks for k in table.candidates[1].report.kinds] == [(0,)]


def test_all_strategies_of_a_world_fill_it():
    found = list(strategies(16, dt.devices.Network(ranks_per_node=4)))
    assert len(set(found)) == len(found)
    assert all(s.degrees(16).world == 16 and s.degrees(16).tp <= 4 for s in found)
    assert {s.degrees(16).pp for s in found} == {1, 2, 4, 8, 16}
