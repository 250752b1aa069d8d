"""pipeline.run: gradients as by plain accumulation, for every schedule; what is live when; errors
before anything is sent."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import pipeline
from disttensor.comm import p2p, send_queue
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]


def batches(count, even=False):
    """Micro-batches of different numbers of rows."""
    return [randn(3 if even else 2 + i % 3, 6, seed=i) for i in range(count)]


def deep(visits, tie=False, skip=False, chosen=False):
    """A program of ``visits`` stages on micro-batches; parameters are made once, before.
    ``chosen``: each has a tensor whose shape depends on data."""

    def program(on: Stages, count, schedule, stages=None):
        widths = [6, *[5] * visits]
        params = [
            (on.leaf(randn(widths[s + 1], widths[s], seed=s), s), on.leaf(randn(5, seed=s + 1), s))
            for s in range(visits)
        ]

        def step(batch):
            x = first = on.value(batch, 0)
            for s, (w, b) in enumerate(params):
                x = torch.tanh(torch.nn.functional.linear(on.to(x, s), w, b))
                first = x if s == 0 else first
                if chosen:
                    x = x + x[x[:, 0] > 0].sum(0)
            if skip:
                x = x + on.to(first, visits - 1)
            if tie:
                x = x @ on.to(params[0][0], visits - 1)
            return (x**2).mean()

        data = batches(count)
        if on.meshes is None:
            return [step(batch) for batch in data]
        return pipeline.run(step, data, schedule, stages=stages)

    return program


def recomputed(on: Stages, count, schedule, stages=None):
    """Two transfers inside a region that is computed again, with a product between them. The second
    stage saves nothing in its part of the region."""
    w0, b0, w1 = on.leaf(randn(5, 6), 0), on.leaf(randn(5), 0), on.leaf(randn(5, seed=1), 1)

    def region(x):
        h = torch.tanh(torch.nn.functional.linear(x, w0))
        return on.to(h, 1) + on.to(h.sin() * b0, 1)

    def step(batch):
        x = on.value(batch, 0)
        y = region(x) if on.meshes is None else checkpoint(region, x, use_reentrant=False)
        return (y * w1).sum()

    data = batches(count)
    if on.meshes is None:
        return [step(batch) for batch in data]
    return pipeline.run(step, data, schedule, stages=stages)


def check(program, meshes, seed, count, schedule, stages=None):
    """As in one process. The backward of the pipeline has run already."""

    def whole(on):
        return program(on, count, schedule, stages)

    def backward(losses):
        for loss in losses:
            if loss.requires_grad:
                loss.backward()

    check_stages(whole, meshes, seed, backward, same_flags=False)


@pytest.mark.feature("Pipelines")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("how", [{}, {"skip": True}, {"tie": True}], ids=str)
@on_ranks(2)
def test_two_stages(schedule, count, how):
    check(deep(2, **how), stage_meshes(), 0, count, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_transfers_inside_a_region_that_is_computed_again(schedule):
    check(recomputed, stage_meshes(), 23, 3, schedule)
    send_queue.QUEUE.flush(10.0)
    assert not send_queue.QUEUE.open  # what a stage sends again is received again


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("kind", [1, 3, 4])
@on_ranks(4)
def test_more_stages(schedule, count, kind):
    meshes = stage_meshes(kind)
    check(deep(len(meshes), skip=True, tie=True), meshes, kind, count, schedule)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("visits", [2, 3])
@on_ranks(2)
def test_interleaved(count, visits):
    meshes = stage_meshes()
    check(deep(2 * visits), meshes, 0, count, "interleaved_1f1b", meshes * visits)
    check(deep(2 * visits), meshes, 0, count, "gpipe", meshes * visits)
    theirs = [DeviceMesh("cpu", mesh.ranks, mesh_dim_names=("tp",)) for mesh in meshes]
    meshes = [dt.ProcessMesh.from_device_mesh(mesh) for mesh in theirs]
    check(deep(2 * visits), meshes, 0, count, "interleaved_1f1b", theirs * visits)


@on_ranks(2)
def test_shapes_that_depend_on_data_are_heard_where_the_schedule_has_them():
    """A rank whose visit is over does not wait for the shape of another's, which may run later."""
    meshes = stage_meshes()
    for schedule, visits in (("interleaved_1f1b", 2), ("gpipe", 2), ("1f1b", 1), ("gpipe", 1)):
        for count in (2, 5):
            stages = meshes * visits if visits > 1 else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dt.errors.FallbackWarning)
                check(deep(2 * visits, chosen=True), meshes, 0, count, schedule, stages)


@pytest.mark.parametrize("count", [3, 8])
@on_ranks(4)
def test_interleaved_on_four(count):
    meshes = stage_meshes(1)
    check(deep(8, skip=True), meshes, 0, count, "interleaved_1f1b", meshes * 2)


@on_ranks(2)
def test_a_return_within_one_visit():
    """A schedule of one visit waits inside it for what comes back; 1f1b would wait forever."""
    check(deep(3), stage_meshes(), 0, 3, "gpipe")
    with pytest.raises(ValueError, match=r"comes back to an earlier mesh .*interleaved_1f1b"):
        check(deep(3), stage_meshes(), 0, 3, "1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_what_is_live_when(schedule):
    """1f1b holds p - s micro-batches on stage s at most, gpipe all of them."""
    meshes, count = stage_meshes(1), 7
    live: list[int] = [0]
    w = [
        dt.shard_tensor(randn(6, 6, seed=s), mesh, requires_grad=True)
        for s, mesh in enumerate(meshes)
    ]

    class Counted(torch.autograd.Function):
        """Notes the forward and the backward of a micro-batch on this rank."""

        @staticmethod
        def forward(ctx, x):
            live.append(live[-1] + 1)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            live.append(live[-1] - 1)
            return g

    count_it = dt.local_map(Counted.apply, out_placements=[dt.Replicate()], out_shapes=(3, 6))

    def step(batch):
        x = dt.shard_tensor(batch, meshes[0])
        for s, mesh in enumerate(meshes):
            x = dt.reshard(x, mesh) @ w[s]
            x = count_it(x)
        return x.sum()

    pipeline.run(step, batches(count, even=True), schedule)
    stage = next(s for s, mesh in enumerate(meshes) if mesh.coordinate is not None)
    assert max(live) == (count if schedule == "gpipe" else len(meshes) - stage)
    assert live[-1] == 0


@on_ranks(2)
def test_a_recorded_run():
    with pipeline.record() as recorded:
        check(deep(2), stage_meshes(), 0, 3, "1f1b")
    timeline = recorded.timeline()
    assert timeline.ranks == [0, 1]
    order = [str(e.action) for e in recorded.events if e.kind != "wait"]
    stage = next(s for s, mesh in enumerate(stage_meshes()) if mesh.coordinate is not None)
    assert order == [str(a) for a in pipeline.one_f_one_b(2, 3).orders[stage]]
    assert 0 < timeline.bubble < 1


@on_ranks(2)
def test_forward_only():
    meshes = stage_meshes()
    w = dt.shard_tensor(randn(6, 6), meshes[1], requires_grad=True)

    def step(batch):
        return (dt.reshard(dt.shard_tensor(batch, meshes[0]), meshes[1]) @ w).sum()

    data = batches(3)
    with torch.no_grad():
        losses = pipeline.run(step, data)
    values = [loss.full_tensor(everywhere=True).item() for loss in losses]
    expected = [(batch @ randn(6, 6)).sum().item() for batch in data]
    assert values == pytest.approx(expected) and w.grad is None


@on_ranks(2)
def test_what_cannot_be_run():
    meshes = stage_meshes()
    w = dt.shard_tensor(randn(6, 6), meshes[1], requires_grad=True)

    def step(batch):
        return (dt.reshard(dt.shard_tensor(batch, meshes[0]), meshes[1]) @ w).sum()

    data = batches(2)
    never = pipeline.Schedule(["B0 F0 F1 B1", "F0 B0 F1 B1"])
    stuck = pipeline.Schedule(["F0 B0 F1 B1", "F1 B1 F0 B0"])
    with dt.debugging.record_comms() as comms:
        for schedule, stages, words in (
            ("2f2b", None, "known: 'gpipe'"),
            ("interleaved_1f1b", None, "stages="),
            (never, None, "B0"),
            (stuck, meshes, "never"),
            (pipeline.gpipe(2, 3), meshes, "3 micro-batches"),
            ("1f1b", [meshes[0], meshes[1], meshes[0]], "as often as the others"),
            ("zbv", meshes * 2, "is not an order in which the schedule"),
            (pipeline.Schedule(["F1 F0 B0 B1", "F1 F0 B0 B1"]), None, "give stages="),
        ):
            with pytest.raises(ValueError, match=words):
                pipeline.run(step, data, schedule, stages=stages)
        with pytest.raises(ValueError, match="no micro-batches"):
            pipeline.run(step, [])
    assert len(comms) == 0
    v = dt.shard_tensor(randn(6, 6), meshes[0], requires_grad=True)

    def often(batch):
        x = dt.shard_tensor(batch, meshes[0])
        for _ in range(3):
            x = dt.reshard(dt.reshard(x @ v, meshes[1]) @ w, meshes[0])
        return x.sum()

    with pytest.raises(ValueError, match=r"at .*test_pipeline\.py.* than stages= names it"):
        pipeline.run(often, data[:1], "gpipe", stages=meshes * 2)
    for bad, words in (
        (lambda batch: None, r"gave NoneType for micro-batch 0"),
        (lambda batch: step(batch).expand(2), r"gave f64\[2\] for micro-batch 0"),
        (lambda batch: step(batch).detach(), "does not require grad"),
    ):
        with pytest.raises(TypeError, match=words):
            pipeline.run(bad, data)
    with pytest.raises(ValueError, match=r"2 stages.*3 stages|3 stages.*2 stages"):
        pipeline.run(step, data, pipeline.gpipe(3, 2))
    assert len(pipeline.run(step, data)) == 2  # and it still works


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@on_ranks(3)
def test_a_region_on_two_meshes_that_share_ranks(ranks):
    """Meshes of the same ranks compute the region again alike. Other meshes are refused: rank 0
    would sum over the stage once more than rank 1, which does not have the visit of the mesh
    aside."""
    stages = [dt.ProcessMesh([0, 1], ("x",)), dt.ProcessMesh([2], ("x",))]
    aside, whole = dt.ProcessMesh(ranks, ("y",)), [dt.Replicate()]
    w = dt.randn(6, 6, mesh=aside, requires_grad=True)
    batch = dt.randn(2, 6, mesh=stages[0])

    def region(x):
        h = torch.tanh(dt.reshard(x, aside, whole) @ w)
        h = dt.reshard(dt.reshard(h, stages[0], [dt.Partial()]), stages[0], whole)
        return dt.reshard(h, stages[1], whole)

    def step(x):
        return checkpoint(region, x, use_reentrant=False).sum()

    if len(ranks) == 1:
        with pytest.raises(ValueError, match=r"which shares only ranks \[0\]"):
            pipeline.run(step, [batch], stages=stages)
        return
    pipeline.run(step, [batch], stages=stages)
    grads = w.grad.to_local() if w.is_initialized else None
    w.grad = None
    step(batch).backward()
    assert grads is None or torch.equal(grads, w.grad.to_local())


@on_ranks(2)
def test_a_step_that_fails_leaves_nobody_waiting():
    """The gradient that rank 0 has asked for never comes."""
    a, b = stage_meshes()
    x = dt.shard_tensor(randn(3), a, requires_grad=True)
    fails = iter([False, True])

    def step(_):
        if next(fails) and x.is_initialized:
            raise FloatingPointError
        loss = dt.reshard(torch.tanh(x), b).sum()
        if not x.is_initialized:
            raise FloatingPointError
        return loss

    with pytest.raises(FloatingPointError):
        pipeline.run(step, [1, 2], "1f1b")
    p2p.flush(5)
