"""The runs after one whose step failed on all ranks: nothing is left of it."""

from __future__ import annotations

import itertools
import threading

import pytest

import disttensor as dt
from disttensor import pipeline
from tests.pipeline.test_ways import batches, check, layers, run
from tests.support.failing import POINT, Failure, Interrupt, armed, at_rest, changes, leftovers
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes
from tests.support.training import ways

pytestmark = pytest.mark.filterwarnings(
    "ignore:pipeline.run. stage", "ignore::disttensor.errors.FallbackWarning"
)
SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "interleaved_zero_bubble"]
POINTS = ["as the step begins", "in the first layer", "in the last layer", "in the loss"]
CASES = [*itertools.product(POINTS, (1, 2, 3, 5), (Failure, Interrupt))]


def split(schedule, stage):
    """A model that may fail, its first mesh and the way of the schedule."""
    meshes = stage_meshes()
    order = pipeline.visits(meshes, schedule)
    model = layers()
    for at, point in ((0, POINTS[1]), (-1, POINTS[2])):
        model[at].register_forward_pre_hook(lambda *_, p=point: POINT(p))
    pipeline.split(model, order)
    if stage:
        dt.shard_data_parallel(model, shard_axis="tp", segments=["*"], **ways(stage))
    return model, meshes, order


def fail(model, first, schedule, order, case):
    point, nth, error = case

    def step(batch):
        POINT(POINTS[0])
        out = model(dt.shard_tensor(batch, first))
        POINT(POINTS[3])
        return out.square().sum()

    with armed(point, nth, error) as given, pytest.raises(error) as raised:
        pipeline.run(step, batches(), schedule, stages=order)
    assert raised.value is given


def steps_after(schedule, stage, cases):
    model, meshes, order = split(schedule, stage)
    check(model, run(model, meshes[0], schedule, order))
    for case in cases:
        model.zero_grad()
        before = leftovers(), threading.active_count()
        held = list(model.parameters())
        fail(model, meshes[0], schedule, order, case)
        for p in held:
            p.grad = None
        assert leftovers() == before[0], changes(before[0], leftovers())
        assert threading.active_count() <= before[1] + 5
        for _ in range(3):
            check(model, run(model, meshes[0], schedule, order))
            at_rest(model)
            model.zero_grad()
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_runs_after_a_failed_one(schedule):
    # ranks stop at different transfers of the other micro-batches
    steps_after(schedule, None, [(POINTS[0], 5, Failure), *part(CASES, 1, schedule)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4, timeout=120)
def test_runs_of_sharded_stages_after_a_failed_one(schedule):
    stage = part([1, 2, 3], 1, schedule)[0]
    steps_after(schedule, stage, part(CASES, 1, schedule))
