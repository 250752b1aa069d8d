"""``dt.simulate.plan_strategy``: simulated strategies, sorted by time, and why the others lost."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.errors import SimulationError
from disttensor.simulate import devices, plan_strategy, simulate
from disttensor.simulate.candidates import ProgramShape, strategies
from disttensor.simulate.estimate import Estimate, Estimator
from disttensor.simulate.plan_strategy import Search
from disttensor.simulate.strategy_table import Candidate, StrategyTable

WORLD, WIDTH = 4, 256
# A step is decided by arithmetic, and by what is sent.
DEVICE = devices.Device(
    name="d", peak={torch.float32: 1e12}, bandwidth=1e12, launch=1e-9, memory=1e9, visit=1e-9,
    post=1e-9, gradient=1e-9,
)  # fmt: skip
NETWORK = devices.Network(ranks_per_node=4, within=devices.Link(1e11, 1e-6))


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
    return plan_strategy(build_with, WORLD, candidates, device=DEVICE, network=NETWORK, **more)


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


PLAIN = dt.Strategy()


def found(world, program, like=PLAIN, ranks_per_node=4):
    """Strategies that run, and the reasons why others do not."""
    both = list(strategies(world, devices.Network(ranks_per_node=ranks_per_node), program, like))
    return [s for s, reason in both if not reason], {reason for _, reason in both if reason}


LAYERS = ("tok", "blocks.0", "blocks.1", "blocks.2", "head")
PROGRAM = ProgramShape(rows=48, layers=LAYERS, blocks=LAYERS[1:4])


def test_all_strategies_of_a_world_fill_it():
    ways, _ = found(16, PROGRAM)
    assert len(set(ways)) == len(ways)
    degrees = [s.degrees(16) for s in ways]
    assert all(d.world == 16 and d.tp <= 4 for d in degrees)
    assert {d.pp for d in degrees} == {1, 2, 4} and {d.cp for d in degrees} == {1, 2, 4, 8, 16}
    assert {(s.sharding, s.zero_stage) for s in ways if s.sharding == 8} == {
        (8, 1), (8, 2), (8, 3),
    }  # fmt: skip
    assert {s.recompute for s in ways} == {(), ("blocks.*",), ("tok", "blocks.*", "head")}
    for s, d in zip(ways, degrees, strict=True):
        assert 48 % (s.accumulate_steps * d.dp * d.sharding) == 0  # rows for each rank
        assert (s.schedule == "1f1b") or d.pp > 1
        assert s.schedule not in ("zbv", "interleaved_1f1b") or d.pp == 2  # visits of 5 layers
    assert "dualpipev" in {s.schedule for s in ways}


def test_what_a_program_cannot_do_is_said_once():
    short = ProgramShape(rows=4, layers=LAYERS, splits_sequence=False)
    assert found(16, short)[1] == {
        "tp over nodes", "cp splits nothing: strategy.batch() has it split a sequence",
        "8 stages of 5 layers", "16 stages of 5 layers", "4 rows over 16 ranks",
        "4 rows over 8 ranks",
    }  # fmt: skip
    assert "stages of which layers? apply(..., layers=[...])" in found(4, ProgramShape())[1]
    ways, _ = found(4, ProgramShape(layers=LAYERS))  # rows are not known
    assert {(s.pp or 1, s.accumulate_steps) for s in ways} == {
        (1, 1), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16),
    }  # fmt: skip
    kept = found(2, PROGRAM, dt.Strategy(amp="bf16", recompute=["x"]))[0]
    assert all(s.amp == "bf16" and s.recompute[0] == "x" for s in kept)


def build_gpt(strategy):
    return train(strategy, layers=4)


def train(strategy, layers):
    """Layers of an MLP on rows, over any degree."""
    stages = strategy.visits()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    strategy.apply(model, plan={"*": {"tp": dt.Shard(0)}})
    for weight in model.parameters():
        nn.init.normal_(weight)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(rows):
        x = dt.shard_tensor(rows, stages[0], strategy.batch(sequence=None))
        return model(x).square().mean()

    def step():
        rows = torch.ones(16, WIDTH).chunk(strategy.accumulate_steps)
        dt.pipeline.run(loss, rows, strategy.schedule, stages=stages)
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_estimates_are_near_what_is_simulated():
    """Of stages, schedules, tp and zero stages. The memory is a lower bound: buffers that
    communicate do not count."""
    ways = [
        dt.Strategy(dp=4), dt.Strategy(sharding=4, zero_stage=2), dt.Strategy(tp=2, dp=2),
        dt.Strategy(pp=2, dp=2, accumulate_steps=4), dt.Strategy(pp=4, accumulate_steps=8),
        dt.Strategy(pp=2, dp=2, accumulate_steps=4, schedule="gpipe", recompute=["0", "1"]),
        dt.Strategy(pp=2, tp=2, accumulate_steps=4, schedule="interleaved_1f1b"),
    ]  # fmt: skip
    search = Search(build_gpt, WORLD, DEVICE, NETWORK, 0.0, None, dt.Strategy(), 8, print)
    for strategy in ways:
        one = search.estimator(strategy.tp or 1).probe
        estimate = Estimator(one, WORLD, DEVICE, NETWORK)(strategy, frozenset(strategy.recompute))
        report = simulate(lambda s=strategy: build_gpt(s), WORLD, device=DEVICE, network=NETWORK)
        assert 0.67 < estimate.seconds / report.step_time < 1.5, strategy
        part = estimate.memory / report.fullest.peak_memory
        assert 0.45 < part < 1.1, (strategy, part)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_estimates_count_the_host(kind):
    """Where visits, messages and gradients take longer than all kernels."""
    device = dataclasses.replace(DEVICE, visit=1e-3, post=1e-3, gradient=1e-3, type=kind)
    search = Search(build_gpt, WORLD, device, NETWORK, 0.0, None, dt.Strategy(), 8, print)
    estimator = search.estimator(1)
    for strategy in (
        dt.Strategy(pp=4, accumulate_steps=8), dt.Strategy(pp=2, dp=2, accumulate_steps=4),
        dt.Strategy(pp=2, dp=2, accumulate_steps=8, schedule="interleaved_1f1b"),
        dt.Strategy(sharding=4, zero_stage=2, accumulate_steps=4),
        dt.Strategy(pp=2, sharding=2, zero_stage=3, accumulate_steps=4),
    ):  # fmt: skip
        report = simulate(lambda s=strategy: build_gpt(s), WORLD, device=device, network=NETWORK)
        ratio = estimator(strategy, frozenset()).seconds / report.step_time
        assert 0.67 < ratio < 1.5, (strategy, ratio)


def test_what_kernels_hide_of_the_host_is_not_estimated():
    """Where kernels take longer than the host has to do, and run beside it."""
    found = Search(build_gpt, WORLD, DEVICE, NETWORK, 0.0, None, dt.Strategy(), 8, print)
    one = found.estimator(1).probe
    slow = dataclasses.replace(DEVICE, peak={torch.float32: 1e8})
    for strategy in dt.Strategy(pp=2, dp=2, accumulate_steps=4), dt.Strategy(sharding=4):
        without, hidden, beside = [
            Estimator(one, WORLD, device, NETWORK)(strategy, frozenset()).seconds
            for device in (
                slow, dataclasses.replace(slow, visit=1e-4, post=1e-4, gradient=1e-4),
                dataclasses.replace(slow, visit=1e-2, gradient=1e-2, type="cpu"),
            )
        ]  # fmt: skip
        assert hidden == pytest.approx(without, rel=1e-3) and beside > 1.02 * without


def test_of_all_strategies_few_are_simulated_and_each_other_says_why():
    lines = []
    table = plan_strategy(
        build_gpt, WORLD, device=DEVICE, network=NETWORK, most=3, progress=lines.append
    )
    whole = [c for c in table.candidates if c.simulated]
    assert 1 <= len(whole) <= 3 < len(table.candidates)
    assert all(c.reason for c in table.candidates[1:]) and not table.candidates[0].reason
    assert table.best == min(whole, key=lambda c: c.step_time).strategy
    assert sum(line.startswith("simulating") for line in lines) >= len(whole)
    assert "~" in str(table) and str(table).endswith("more")


def test_what_is_estimated_not_to_fit_is_not_simulated():
    table = plan_strategy(build_gpt, WORLD, device=DEVICE, network=NETWORK, memory=2 << 20, most=2)
    replicas = next(c for c in table.candidates if c.strategy.dp == 4)
    assert replicas.reason.startswith("about ") and replicas.reason.endswith(" over")
    assert replicas.report is None and not replicas.fits
    for c in table.candidates:
        assert not (c.fits and c.simulated) or c.report.fullest.peak_memory <= 2 << 20


def test_ranks_that_share_a_device_compute_in_the_bubbles_of_each_other():
    """Two stages with one micro-batch take turns: little more time on half as many devices, as only
    their optimizers run at the same time."""
    both = dataclasses.replace(DEVICE, sharing=2)
    ways = [dt.Strategy(pp=2, dp=2), dt.Strategy(dp=4)]
    alone = plan_strategy(build_gpt, WORLD, ways, device=DEVICE, network=NETWORK)
    shared = plan_strategy(build_gpt, WORLD, ways, device=both, network=NETWORK)
    staged, replicas = [
        [{c.strategy: c.step_time for c in t.candidates}[way] for t in (alone, shared)]
        for way in ways
    ]
    assert staged[1] < 1.2 * staged[0] and replicas[1] > 1.3 * replicas[0]
    search = Search(build_gpt, WORLD, both, NETWORK, 0.0, None, dt.Strategy(), 8, print)
    estimator = search.estimator(1)
    for way, simulated in zip(ways, (staged[1], replicas[1]), strict=True):
        assert 0.67 < estimator(way, frozenset()).seconds / simulated < 1.5, way


def test_of_times_that_are_alike_the_default_schedule_is_chosen() -> None:
    def simulated(schedule: str, seconds: float) -> Candidate:
        report: Any = SimpleNamespace(
            world=1, kinds=[SimpleNamespace(ranks=(0,))], step_time=seconds,
            exposed_communication=0.0, bubble=0.0,
        )  # fmt: skip
        return Candidate(dt.Strategy(schedule=schedule), report, "", fits=True)

    for slower, chosen in ((1.019, "1f1b"), (1.021, "zero_bubble")):
        tried = [simulated("gpipe", 1.5), simulated("1f1b", slower), simulated("zero_bubble", 1.0)]
        found = StrategyTable.of(1, tried)
        assert found.best.schedule == chosen
        assert [c.step_time for c in found.candidates[1:]] == sorted(
            c.step_time for c in tried if c.strategy.schedule != chosen
        )
        assert (found.candidates[1].reason == "as fast, by another schedule") is (chosen == "1f1b")


def test_what_was_neither_simulated_nor_estimated_says_so() -> None:
    report: Any = SimpleNamespace(
        world=1, kinds=[SimpleNamespace(ranks=(0,))], step_time=1.0, exposed_communication=0.0,
        bubble=0.0,
    )  # fmt: skip
    best = Candidate(dt.Strategy(), report, "", fits=True, estimate=Estimate({"computes": 1.0}, 1))
    other = Candidate(dt.Strategy(tp=2), None, "", fits=True)
    found = StrategyTable.of(1, [other, best])
    assert [c.reason for c in found.candidates] == ["", "not simulated"]
