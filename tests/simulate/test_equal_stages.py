"""Stages that follow from others: what they do is what they do when they are run."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.simulate import simulate, templates
from disttensor.simulate.events import Gradient
from tests.simulate.gpt_training import build as build_gpt

runner = importlib.import_module("disttensor.simulate.runner")
run = importlib.import_module("disttensor.simulate.run")


@pytest.fixture
def ran(monkeypatch):
    """The ranks whose program was run."""
    of, usual = [], run.start_rank
    monkeypatch.setattr(run, "start_rank", lambda *a: (of.append(a[1]), usual(*a))[1])
    return of


def every_stage(monkeypatch, build, world):
    """The report where nothing follows from anything."""
    with monkeypatch.context() as patch:
        patch.setattr(runner, "derived_ranks", lambda *_: [])
        return simulate(build, world=world)


def same(a, b):
    """But for the order in which memory is freed between two operators."""
    assert [k.ranks for k in a.kinds] == [k.ranks for k in b.kinds]
    for one, other in zip(a.kinds, b.kinds, strict=True):
        assert list(one.comms) == list(other.comms)
        assert one.flops_by("where") == other.flops_by("where")
        assert one.flops_by("layer") == other.flops_by("layer")
        assert one.messages() == other.messages()
        assert one.memory.peak == other.memory.peak
        assert one.memory.at_peak == other.memory.at_peak
        assert one.timeline.times == other.timeline.times
    assert a.step_time == b.step_time


@pytest.mark.limit(300)
def test_what_follows_is_what_a_run_shows(ran, monkeypatch) -> None:
    """Layers 2 to 7 of eight are three stages; the last of them hands on to another line."""
    world = 6
    options = "--pp=6 --layers=8 --batch=4 --accumulate=4 --width=16"
    report = simulate(lambda: build_gpt(options), world=world)

    assert 2 not in ran
    same(report, every_stage(monkeypatch, lambda: build_gpt(options), world))


class Layer(nn.Module):
    def __init__(self, slow: bool, holds: bool = False) -> None:
        super().__init__()
        self.linear, self.slow, self.holds = nn.Linear(4, 4), slow, holds

    def forward(self, x):
        held = [x.detach().expand(500, *x.shape).clone()]
        if not self.holds:
            held.clear()
        x = self.linear(x)
        x.detach().expand(500, *x.shape).clone()
        return x @ torch.ones(4, 4) if self.slow else x


def layers(slow: int, nested: bool = False, holds: int = -1):
    def build():
        stages = dt.Strategy(pp=6).stages()
        every = [Layer(i == slow, i == holds) for i in range(6)]
        model = nn.Sequential(*every)
        if nested:
            model = nn.Sequential(
                *(nn.Sequential(*every[a:b]) for a, b in ((0, 2), (2, 3), (3, 6)))
            )
        dt.pipeline.split(every if nested else model, stages, of=model if nested else None)
        optimizer = torch.optim.SGD(model.parameters())

        def loss(x):
            return model(dt.shard_tensor(x, stages[0])).sum()

        def step():
            dt.pipeline.run(loss, torch.ones(8, 4).chunk(2), stages=stages)
            optimizer.step()

        return step

    return build


@pytest.mark.parametrize("slow", [2, 4])
def test_a_stage_with_the_same_parameters_that_does_more_is_run(slow, ran, monkeypatch) -> None:
    report = simulate(layers(slow), world=6)
    flops = [k.flops for k in report.kinds]
    assert flops[slow] > flops[1 if slow == 2 else 2]
    assert slow in ran
    same(report, every_stage(monkeypatch, layers(slow), 6))


@pytest.mark.parametrize("holds", [1, 4])
def test_a_stage_at_an_end_that_frees_its_memory_later_is_by_itself(holds, monkeypatch) -> None:
    """It makes the same calls in the same order."""
    report = simulate(layers(-1, holds=holds), world=6)
    peaks = [k.peak_memory for k in report.kinds]
    assert peaks[holds] > 1.5 * peaks[2] and peaks[2] == peaks[3]
    same(report, every_stage(monkeypatch, layers(-1, holds=holds), 6))


def test_a_middle_stage_is_not_run_where_it_does_the_same(ran) -> None:
    simulate(layers(-1), world=6)
    assert 2 not in ran and 3 not in ran
    with pytest.raises(ValueError, match="3 stages later"):
        templates.DerivedRank(2, 2, 1, 4, (1, 4)).interpolate(5, 7)


def test_runs_whose_gradients_come_on_other_lines_are_not_the_same() -> None:
    rank = templates.DerivedRank(2, 2, 1, 4, (1, 4))
    one, other = Gradient("a.py:1"), Gradient("a.py:2")
    assert templates._event(one, one, rank, str) == one
    with pytest.raises(ValueError, match=r"a.py:1.*a.py:2"):
        templates._event(one, other, rank, str)


def test_layers_in_other_modules_have_their_own_names(ran, monkeypatch) -> None:
    report = simulate(layers(-1, nested=True), world=6)
    assert 2 not in ran and 3 not in ran
    assert [name for kind in report.kinds for name in kind.layers] == [
        "0.0.linear", "0.1.linear", "1.0.linear", "2.0.linear", "2.1.linear", "2.2.linear",
    ]  # fmt: skip
    same(report, every_stage(monkeypatch, layers(-1, nested=True), 6))


def unlike_ends():
    """Eight equal layers, of which the second and the last are called on lines of their own. In
    between each rank takes a view of a plain tensor for each layer, its own or not."""
    stages = dt.Strategy(pp=8).stages()
    model = nn.Sequential(*[Layer(False) for _ in range(8)])
    dt.pipeline.split(model, stages)
    optimizer = torch.optim.SGD(model.parameters())

    def loss(x):
        x = model[0](dt.shard_tensor(x, stages[0]))
        x = model[1](x)
        table = torch.ones(4)
        for layer in model[2:-1]:
            table.unsqueeze(0)
            x = layer(x)
        return model[-1](x).sum()

    def step():
        dt.pipeline.run(loss, torch.ones(8, 4).chunk(2), stages=stages)
        optimizer.step()

    return step


def test_stages_between_two_that_are_by_themselves_follow(ran, monkeypatch) -> None:
    report = simulate(unlike_ends, world=8)
    assert sorted(ran) == [0, 1, 2, 5, 6, 7]
    same(report, every_stage(monkeypatch, unlike_ends, 8))
