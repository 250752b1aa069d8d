"""Schedules that are searched: within the memory, no slower than those with a name, and those that
were found run."""

from __future__ import annotations

import random

import pytest
import torch

import disttensor as dt
from disttensor import pipeline
from disttensor.pipeline import Costs
from tests.pipeline.test_schedule import assert_obeys
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes


def drawn(seed, virtual):
    draw = random.Random(seed)
    rows = [[draw.uniform(0.2, 2) for _ in range(virtual)] for _ in range(3)]
    return Costs(*rows, transfer=draw.choice([0.0, 0.3]))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_found_fits_and_is_no_slower_than_those_with_a_name(seed):
    draw = random.Random(seed)
    p, m, chunks = draw.randint(1, 4), draw.randint(1, 7), draw.choice([1, 1, 2])
    shape = draw.choice(["loop", "v"]) if chunks == 2 else "loop"
    costs = drawn(seed, p * chunks)
    room = [draw.randint(chunks, 2 * p + 1) for _ in range(p)]
    found = pipeline.search(costs, room, stages=p, micro_batches=m, chunks=chunks, shape=shape)
    assert (found.stages, found.micro_batches, found.chunks, found.shape) == (p, m, chunks, shape)
    assert_obeys(found)
    assert all(found.peak(s) <= room[s] for s in range(p))
    for name in pipeline.schedules.NAMES:
        try:
            other = pipeline.named(name, p, m, chunks)
        except ValueError:
            continue
        if other.shape == shape and all(other.peak(s) <= room[s] for s in range(p)):
            assert costs.span(found) <= costs.span(other)


def test_more_memory_fills_more_of_the_bubble():
    costs = Costs(1, 1, 1, transfer=0.1)
    spans = [
        costs.span(pipeline.search(costs, memory, stages=4, micro_batches=8))
        for memory in (1, 2, 4, 8)
    ]
    assert spans == sorted(spans, reverse=True) and spans[0] > spans[1] > spans[2] > spans[3]
    assert (
        spans[3] < costs.span(pipeline.zero_bubble(4, 8)) < costs.span(pipeline.one_f_one_b(4, 8))
    )


def test_what_is_found_starts_actions_when_their_transfers_have_come():
    costs = Costs(1, 1, 1, transfer=2)
    found = pipeline.search(costs, stages=2, micro_batches=5, chunks=2)
    assert costs.span(found) <= 54


def test_span_by_hand():
    made = pipeline.Schedule(["F0 F1 B0 I1 W1", "F0 B0 F1 I1 W1"])
    # last stage: F 1.5 to 4.5, B to 8.5, F to 11.5, I to 14.5; then first: I 15 to 16, W to 18
    assert Costs([1, 3], [1, 3], [2, 1], transfer=0.5).span(made) == 18.0


@pytest.mark.parametrize("kinds", ["FB", "FIW"])
def test_costs_of_a_timeline_are_those_of_its_actions(kinds):
    """A backward that was not split is one half for the input and one for the weights."""
    seconds = {"F": 1.0, "B": 4.0, "I": 3.0, "W": 2.0}
    events, now = [], 0.0
    for micro_batch in range(3):
        for kind in kinds:
            more = seconds[kind] * (1 + (micro_batch == 2))  # the median counts
            events.append(pipeline.Event(0, 0, kind, micro_batch, 0, now, now + more))
            now += more
    costs = Costs.of(pipeline.Timeline(events))
    found = [costs.of_action(0, kind) for kind in "FIWB"]
    assert found == ([1.0, 2.0, 2.0, 4.0] if kinds == "FB" else [1.0, 3.0, 2.0, 5.0])


def test_what_is_no_cost_and_no_memory():
    for wrong, says in (
        (lambda: Costs(-1, 1, 1), "forward=-1: durations are 0 or more"),
        (lambda: Costs(1, [1, float("inf")], 1), "inputs=.*finite"),
        (lambda: Costs([1, 2], 1, 1).check(3), "2 numbers, and there are 3 virtual stages"),
        (lambda: pipeline.search(Costs(1, 1, 1), 1, stages=2, micro_batches=2, chunks=2),
         "visits a stage 2 times before"),
        (lambda: pipeline.search(Costs(1, 1, 1), [3, 1], stages=2, micro_batches=2, chunks=2),
         "visits a stage 2 times before"),
        (lambda: pipeline.search(Costs(1, 1, 1), [1], stages=2, micro_batches=2),
         "one number for each of 2 stages"),
        (lambda: pipeline.search(Costs(1, 1, 1), stages=2, micro_batches=2, shape="u"),
         "shape='u': 'loop' or 'v' is expected"),
        (lambda: Costs.of(pipeline.Timeline([])), "no forward and no backward"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            wrong()


@on_ranks(2)
def test_a_schedule_for_what_was_measured():
    """All ranks find the same one, and it gives the gradients of 1f1b."""
    meshes, data = stage_meshes(), [randn(3, 6, seed=i) for i in range(5)]

    def trained(schedule, stages=None):
        w = [dt.shard_tensor(randn(6, 6, seed=s), m, requires_grad=True)
             for s, m in enumerate(meshes)]  # fmt: skip

        def step(batch):
            x = dt.shard_tensor(batch, meshes[0])
            for s, mesh in enumerate(meshes):
                x = torch.tanh(dt.reshard(x, mesh) @ w[s])
            return x.square().sum()

        with pipeline.record() as recorded:
            pipeline.run(step, data, schedule, stages=stages)
        return recorded.timeline(), [None if p.grad is None else p.grad.local for p in w]

    measured, expected = trained("zero_bubble")
    costs = Costs.of(measured)
    assert min(*costs.forward, *costs.inputs, *costs.weights) > 0
    found = pipeline.search(costs, memory=3, stages=2, micro_batches=5)
    group = torch.distributed.group.WORLD
    said = [None, None]
    torch.distributed.all_gather_object(said, repr(found), group=group)
    assert said[0] == said[1]
    for g, e in zip(trained(found, meshes)[1], expected, strict=True):
        assert (g is None and e is None) or torch.equal(g, e)
