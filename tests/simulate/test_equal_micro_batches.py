"""Micro-batches that follow from others: what they do is what they do when they are run."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import pipeline, runtime
from disttensor.comm import p2p
from disttensor.pipeline.schedules import NAMES, named
from disttensor.simulate import simulate, templates
from disttensor.simulate.events import Visit
from tests.simulate.gpt_training import build as build_gpt
from tests.support.part import part

run = importlib.import_module("disttensor.simulate.run")
runner = importlib.import_module("disttensor.simulate.runner")


@pytest.fixture
def ran(monkeypatch):
    """(rank, with few micro-batches) of what was run."""
    of, usual = [], run.start_rank
    monkeypatch.setattr(run, "start_rank", lambda *a: (of.append((a[1], a[-1])), usual(*a))[1])
    return of


def every_micro_batch(monkeypatch, build, world):
    with monkeypatch.context() as patch:
        patch.setattr(runner, "can_extend", lambda _: False)
        return simulate(build, world=world)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "options",
    part(
        [
            "--pp=4 --batch=12 --accumulate=12",
            "--pp=2 --sharding=2 --zero=3 --batch=20 --accumulate=10 --segment-mb=0.02",
            "--pp=2 --tp=2 --batch=16 --accumulate=16 --schedule=zero_bubble",
            "--pp=2 --dp=2 --batch=32 --accumulate=16 --schedule=interleaved_1f1b --recompute",
        ],
        1,
    ),
)
def test_what_follows_is_what_a_run_shows(options, ran, monkeypatch) -> None:
    report = simulate(lambda: build_gpt(options), world=4)
    assert [rank for rank, is_few in ran if not is_few] == [0]
    whole = every_micro_batch(monkeypatch, lambda: build_gpt(options), 4)
    assert [k.ranks for k in report.kinds] == [k.ranks for k in whole.kinds]
    for one, other in zip(report.kinds, whole.kinds, strict=True):
        assert list(one.comms) == list(other.comms)
        assert one.messages() == other.messages() and one.flops == other.flops
        assert one.flops_by("layer") == other.flops_by("layer")
        visits = [[e for e in k.events if isinstance(e, Visit)] for k in (one, other)]
        assert visits[0] == visits[1] and {v.phase for v in visits[0]} == {"forward", "backward"}
        assert one.memory.peak == other.memory.peak
        assert one.memory.at_peak == other.memory.at_peak
        assert one.memory.kept == other.memory.kept
        assert one.timeline.times == other.timeline.times


def test_micro_batches_that_are_not_alike_are_all_run(ran, monkeypatch) -> None:
    def build():
        stages = dt.Strategy(pp=2).stages()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        dt.pipeline.split(model, stages)

        def loss(x):
            return model(dt.shard_tensor(x, stages[0])).sum()

        rows = [torch.ones(5 if i == 4 else 2, 4) for i in range(10)]
        return lambda: pipeline.run(loss, rows, stages=stages)

    report = simulate(build, world=2)
    assert ran == [(0, False), (1, False)]
    whole = every_micro_batch(monkeypatch, build, 2)
    assert [k.flops for k in report.kinds] == [k.flops for k in whole.kinds]
    assert [k.comms.total_bytes for k in report.kinds] == [k.comms.total_bytes for k in whole.kinds]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_where_one_micro_batch_keeps_memory_all_are_run(kept, ran, monkeypatch) -> None:
    """They make the same calls in the same order."""

    def build():
        stages = dt.Strategy(pp=2).stages()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        dt.pipeline.split(model, stages)
        seen, held = [], []

        def loss(x):
            y = model(dt.shard_tensor(x, stages[0]))
            seen.append(y.detach().expand(200, *y.shape).clone())
            if len(seen) != kept + 1:
                seen[-1] = None
            return y.sum()

        def step():
            seen.clear()
            pipeline.run(loss, [torch.ones(2, 4)] * 10, stages=stages)
            held.append(list(seen))

        return step

    report = simulate(build, world=2)
    whole = every_micro_batch(monkeypatch, build, 2)
    assert [k.memory.peak for k in report.kinds] == [k.memory.peak for k in whole.kinds]


@pytest.mark.parametrize("calls", ["other calls", "the same calls"])
def test_where_one_micro_batch_needs_more_memory_for_a_moment_all_are_run(
    calls, ran, monkeypatch
) -> None:
    """The step ends with the same memory."""

    def build():
        stages = dt.Strategy(pp=2).stages()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        dt.pipeline.split(model, stages)
        count = []

        def loss(x):
            x = dt.shard_tensor(x, stages[0])
            y = model(x)
            count.append(len(count))
            for seen in (x, y.detach()):  # on both stages
                if calls == "other calls":
                    seen.expand(2000 if len(count) == 6 else 1, *seen.shape).clone()
                    continue
                held = [seen.expand(2000, *seen.shape).clone()]
                if len(count) != 6:
                    held.clear()
                seen.expand(2000, *seen.shape).clone()
            return y.sum()

        def step():
            count.clear()
            pipeline.run(loss, [torch.ones(2, 4)] * 10, stages=stages)

        return step

    report = simulate(build, world=2)
    whole = every_micro_batch(monkeypatch, build, 2)
    peaks = [k.memory.peak for k in whole.kinds]
    assert [k.memory.peak for k in report.kinds] == peaks and max(peaks) > 2000 * 2 * 4 * 4


@pytest.mark.parametrize("schedule", sorted(NAMES))
def test_few_micro_batches_come_to_all_situations_and_to_the_last_backward(schedule) -> None:
    chunks = 2 if NAMES[schedule].needs_stages else 1
    for row in named(schedule, 4, 16, chunks).orders:
        rest = templates.shorten(row)
        kept = {a.micro_batch for a in rest}
        assert list(rest) == [a for a in row if a.micro_batch in kept]
        assert set(templates.situations(row)) <= set(templates.situations(rest))
        assert row[0] in rest
        for chunk in range(chunks):
            assert [a for a in row if a.kind != "F" and a.chunk == chunk][-1] in rest
    assert len(templates.shorten(pipeline.gpipe(4, 64).orders[0])) == 4 * 2
    assert 15 in {a.micro_batch for a in templates.shorten(pipeline.one_f_one_b(16, 16).orders[4])}


def test_the_tag_of_a_transfer_in_another_channel() -> None:
    def tags(channel: int, before: int) -> list[int]:
        runtime.current_runtime().tags[channel] = before
        with p2p.channel(channel):
            return [p2p.next_tag() for _ in range(3)]

    kept = dict(runtime.current_runtime().tags)
    for before, after in (((3, 0), (5, 7)), ((3, 8191), (900, 8190))):
        mine, its = tags(*before), tags(*after)
        assert [p2p.tag_in_channel(t, before, after) for t in mine] == its
        assert [p2p.tag_in_channel(t + 1, before, after) for t in mine] == [t + 1 for t in its]
        assert p2p.tag_in_channel(mine[0], (4, 0), after) == mine[0]
    runtime.current_runtime().tags.clear()
    runtime.current_runtime().tags.update(kept)
