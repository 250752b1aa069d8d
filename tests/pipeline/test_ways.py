"""The way of a program over the stages against that of the schedule: they agree, or there is an
error on all ranks; and records know the stages of both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import pipeline
from disttensor.pipeline import Costs, Event, Timeline
from tests.support import pool
from tests.support.oracle import randn
from tests.support.pool import RanksFailed, on_ranks, run_on_ranks
from tests.support.stages import stage_meshes

pytestmark = pytest.mark.filterwarnings("ignore:pipeline.run. stage")  # what is not put off
LOOP, V = "interleaved_1f1b", "zbv"


def layers(number=8):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(number)])


def batches(count=5):
    return [randn(2 + i % 3, 5, seed=i).float() for i in range(count)]


def check(model, losses):
    """As by ``backward`` of each loss in one process."""
    plain = layers()
    expected = [plain(batch).square().sum() for batch in batches()]
    sum(expected).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.is_initialized:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    for loss, one in zip(losses, expected, strict=True):
        torch.testing.assert_close(dt.broadcast_value(loss), one.detach())


def run(model, first, schedule, stages):
    def step(batch):
        return model(dt.shard_tensor(batch, first)).square().sum()

    return pipeline.run(step, batches(), schedule, stages=stages)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved_zero_bubble"])
@pytest.mark.parametrize("visits", [2, None])
@on_ranks(2)
def test_a_strategy_lays_out_a_model_on_the_way_of_its_schedule(schedule, visits):
    strategy = dt.Strategy(pp=2, schedule=schedule)
    model, _ = strategy.apply(layers(), visits=visits)
    check(model, run(model, strategy.stages()[0], schedule, strategy.visits()))


@on_ranks(4)
def test_a_strategy_lays_out_four_stages_there_and_back():
    strategy = dt.Strategy(pp=4, schedule="zbv")
    model, _ = strategy.apply(layers(), visits=2)
    check(model, run(model, strategy.stages()[0], "zbv", strategy.visits()))


@on_ranks(2)
def test_other_numbers_of_visits_than_there_and_back_are_refused():
    model = layers()
    for schedule in ("zbv", "dualpipev"):
        with pytest.raises(ValueError, match=f"visits=3: '{schedule}' visits each stage twice"):
            dt.Strategy(pp=2, schedule=schedule).apply(model, visits=3)
    assert all(type(p) is nn.Parameter for p in model.parameters())


WAYS = {
    "there and back": lambda m: [*m, *reversed(m)],
    "twice in a loop": lambda m: m * 2,
    "once": lambda m: list(m),
}


@pytest.mark.parametrize(
    "split, taken, schedule",
    [
        ("twice in a loop", "there and back", "zbv"),
        ("twice in a loop", "there and back", "dualpipev"),
        ("twice in a loop", "once", "1f1b"),
        ("twice in a loop", "once", "zero_bubble"),
        ("there and back", "twice in a loop", "interleaved_1f1b"),
        ("there and back", "twice in a loop", "gpipe"),
    ],
)
def test_a_model_on_another_way_is_refused_before_anything_is_sent(split, taken, schedule):
    refused(split, taken, schedule)


@on_ranks(2)
def refused(split, taken, schedule):
    meshes = stage_meshes()
    model = layers()
    pipeline.split(model, WAYS[split](meshes))
    with (
        dt.debugging.record_comms() as sent,
        pytest.raises(ValueError, match=r"the model is split over the visits"),
    ):
        run(model, meshes[0], schedule, WAYS[taken](meshes))
    assert not sent.records and all(p.grad is None for p in model.parameters())
    mine = V if split == "there and back" else LOOP
    check(model, run(model, meshes[0], mine, WAYS[split](meshes)))


@on_ranks(4)
def test_a_model_on_another_way_over_four_stages_is_refused():
    meshes = stage_meshes(1)
    model = layers()
    pipeline.split(model, meshes * 2)
    with (
        dt.debugging.record_comms() as sent,
        pytest.raises(ValueError, match=r"the model is split over the visits"),
    ):
        run(model, meshes[0], "zbv", WAYS["there and back"](meshes))
    assert not sent.records
    check(model, run(model, meshes[0], LOOP, meshes * 2))


@on_ranks(2)
def test_models_on_parts_of_the_way_are_run():
    meshes = stage_meshes()
    model = layers()
    for half in (model[:4], model[4:]):
        pipeline.split(half, meshes)
    check(model, run(model, meshes[0], LOOP, meshes * 2))


@on_ranks(2)
def test_one_visit_for_all_forwards_may_go_to_and_fro():
    meshes = stage_meshes()
    model = layers()
    pipeline.split(model, meshes * 2)
    check(model, run(model, meshes[0], "gpipe", meshes))


def by_hand(meshes, way):
    """(weights, step) of a program that brings its tensors along ``way`` itself."""
    weights = [dt.shard_tensor(randn(5, 5, seed=i).float(), meshes[s], requires_grad=True)
               for i, s in enumerate(way)]  # fmt: skip

    def step(batch):
        x = dt.shard_tensor(batch, meshes[way[0]])
        for w in weights:
            x = torch.tanh(dt.reshard(x, w.process_mesh) @ w)
        return x.square().sum()

    return weights, step


@pytest.mark.parametrize(
    "way, taken, schedule, why",
    [
        ([0, 1, 0, 1], [0, 1, 1, 0], "zbv", "not in the order|more often"),
        ([0, 1, 0, 1], [0, 1], "1f1b", "not in the order"),
        ([0, 1, 0], [0, 1, 0, 1], "interleaved_1f1b", "visited .* 1 time, but stages="),
        ([0, 1], [0, 1, 0, 1], "interleaved_1f1b", "visited .* 1 time, but stages="),
        ([0, 1, 0, 1, 0], [0, 1, 0, 1], "interleaved_1f1b", "more often"),
    ],
)
def test_a_program_that_leaves_the_way_raises_on_all_ranks(way, taken, schedule, why, monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 30.0)  # seconds between the ranks
    with pytest.raises(RanksFailed, match=f"(?s)ranks 0, 1 of 2 raised.*({why})"):
        run_on_ranks(2, leave, way, taken, schedule)


def leave(way, taken, schedule):
    meshes = stage_meshes()
    pipeline.run(by_hand(meshes, way)[1], batches(), schedule, stages=[meshes[s] for s in taken])


@on_ranks(2)
def test_a_value_without_a_gradient_may_come_back():
    meshes = stage_meshes()
    _, step = by_hand(meshes, [0, 1])
    came = []

    def told(batch):
        loss = step(batch)
        came.append(dt.reshard(loss.detach(), meshes[0]))
        return loss

    losses = pipeline.run(told, batches(), "1f1b", stages=meshes)
    assert [dt.broadcast_value(x) for x in came] == [dt.broadcast_value(x) for x in losses]


# Records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "way, schedule, given",
    [([0, 1], "1f1b", True), ([0, 1], "1f1b", False), ([0, 1, 1, 0], "zbv", True)],
)
@on_ranks(2)
def test_each_event_is_of_the_stage_of_its_rank(grad, way, schedule, given):
    meshes = stage_meshes()
    _, step = by_hand(meshes, way)
    stages = [meshes[s] for s in way] if given else None
    with pipeline.record() as recorded, torch.set_grad_enabled(grad):
        pipeline.run(step, batches(), schedule, stages=stages)
    rank = torch.distributed.get_rank()
    assert {e.stage for e in recorded.events} == {rank}
    assert {e.kind for e in recorded.events} >= ({"F", "B"} if grad else {"F"})
    line = recorded.timeline()
    assert {(e.rank, e.stage) for e in line.events} == {(0, 0), (1, 1)}


def test_costs_of_a_recorded_run_are_in_the_order_of_its_visits():
    """Of virtual stages that take 1, 2, 3, ... for F, twice that for I and thrice for W."""
    for schedule in (
        pipeline.zbv(3, 7),
        pipeline.dualpipev(3, 7),
        pipeline.interleaved_1f1b(3, 7, 2),
    ):
        costs = Costs([1.0, 2, 3, 4, 5, 6], [2.0, 4, 6, 8, 10, 12], [3.0, 6, 9, 12, 15, 18])
        rows = schedule.simulated(
            lambda s, a, to=schedule: costs.of_action(to.virtual(s, a.chunk), a.kind)
        )[0]
        line = Timeline([
            Event(s, s, *tick.action, tick.start, tick.end, schedule.shape)
            for s, row in enumerate(rows) for tick in row
        ])  # fmt: skip
        found = Costs.of(line)
        assert found.forward == costs.forward
        for v in range(6):
            assert found.of_action(v, "B") == pytest.approx(costs.of_action(v, "B"))
        if all(a.kind in "FB" for row in schedule.orders for a in row):
            assert found.inputs == found.weights == (2.5, 5, 7.5, 10, 12.5, 15)
        assert found.span(schedule) == pytest.approx(line.span)
    with pytest.raises(ValueError, match="in a loop and in a V"):
        Costs.of(Timeline.of(pipeline.zbv(3, 7)) + Timeline.of(pipeline.interleaved_1f1b(3, 7, 2)))


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved_1f1b", "1f1b"])
@on_ranks(2)
def test_ranks_outside_a_local_map_of_given_shapes_hear_of_each_micro_batch(schedule):
    """A rank may come to a later micro-batch before it hears of the first one."""
    meshes = stage_meshes()
    order = pipeline.visits(meshes, schedule)
    given = [randn(3, 5, seed=i).float() for i in range(5)]
    model, plain = layers(), layers()
    pipeline.split(model, order)
    double = dt.local_map(lambda x: x * 2, out_placements=[dt.Replicate()], out_shapes=[3, 5])
    for layer, other in zip(model, plain, strict=True):
        layer.register_forward_hook(lambda module, args, out: double(out))
        other.register_forward_hook(lambda module, args, out: out * 2)

    def step(batch):
        return model(dt.shard_tensor(batch, meshes[0])).square().sum()

    for _ in range(2):
        pipeline.run(step, given, schedule, stages=order)
        sum(plain(batch).square().sum() for batch in given).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.is_initialized:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
