"""``dt.accumulate`` around ``pipeline.run``: the gradients of all micro-batches of several runs, as
one process adds them up."""

from __future__ import annotations

import itertools

import pytest
import torch

import disttensor as dt
from disttensor import Shard, pipeline
from tests.fsdp.test_shard_pipeline import Model, stages_of, whole
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import STAGES, compare, full, sgd, ways

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
SCHEDULES = [
    "gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "interleaved_zero_bubble", "zbv",
    "dualpipev",
]  # fmt: skip
CASES = [*itertools.product(SCHEDULES, STAGES, ["scatter", "none"], ["fsdp", "dp x fsdp"])]


@pytest.mark.parametrize(("schedule", "stage", "reduce", "kind"), part(CASES, 4))
@on_ranks(4)
def test_gradients_of_several_runs_add_up(schedule, stage, reduce, kind):
    plain, model = (seeded() for _ in range(2))
    meshes = stages_of(kind)
    order = pipeline.visits(meshes, schedule)
    pipeline.split([model.first, *model.blocks, model.last], order, of=model)
    dt.shard_data_parallel(model, segments=["blocks.*"], **ways(stage))
    opt, ref = sgd(model.parameters()), sgd(plain.parameters())
    split = [Shard(0)] * meshes[0].ndim

    def loss(x):
        return model(dt.shard_tensor(x, meshes[0], split)).square().sum()

    for step in range(2):
        opt.zero_grad()
        ref.zero_grad()
        for run in range(2):
            data = [randn(2 + j % 3, 6, seed=20 * step + 10 * run + j) for j in range(4)]
            for x in data:
                plain(x).square().sum().backward()
            with dt.accumulate(model, last=run == 1, reduce=reduce):
                pipeline.run(loss, data, schedule, stages=order)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if p.is_initialized:
                compare(full(p.grad), q.grad)
        opt.step()
        ref.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        compare(whole(p), q.detach())


def seeded():
    torch.manual_seed(0)
    return Model().double()
