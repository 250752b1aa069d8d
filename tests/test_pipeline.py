"""pipeline.run: gradients as by plain accumulation, for every schedule; what is live when; errors before anything is sent."""

from __future__ import annotations

import pytest
import torch

from disttensor import pipeline
from tests.oracle import randn
from tests.pool import on_ranks
from tests.stages import Stages, check_stages, stage_meshes

SCHEDULES = ["gpipe", "1f1b"]


def batches(count, even=False):
    """Micro-batches of different numbers of rows."""
    return [randn(3 if even else 2 + i % 3, 6, seed=i) for i in range(count)]


def deep(visits, tie=False, skip=False):
    """A program of ``visits`` stages on micro-batches; parameters are made once, before."""

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


def check(program, meshes, seed, count, schedule, stages=None):
    """As in one process. The backward of the pipeline has run already."""

    def whole(on):
        return program(on, count, schedule, stages)

    def backward(losses):
        for loss in losses:
            if loss.requires_grad:
                loss.backward()

    check_stages(whole, meshes, seed, backward, same_flags=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("how", [{}, {"skip": True}, {"tie": True}], ids=str)
@on_ranks(2)
def test_two_stages(schedule, count, how):
    check(deep(2, **how), stage_meshes(), 0, count, schedule)


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
