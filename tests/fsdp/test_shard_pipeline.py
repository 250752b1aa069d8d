"""shard_data_parallel on the meshes of pipeline stages: gradients are those of one process, and are
reduced once per step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import ProcessMesh, Shard, pipeline
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import STAGES, compare, engine, full, sgd, ways

SHAPES = {
    "fsdp": ((2,), ("fsdp",)),
    "dp x fsdp": ((2, 1), ("dp", "fsdp")),
    "fsdp x dp": ((2, 1), ("fsdp", "dp")),
}


class Block(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.up, self.down, self.norm, self.again = (
            nn.Linear(6, 7),
            nn.Linear(7, 6),
            nn.LayerNorm(6),
            again,
        )

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x))


class Model(nn.Module):
    def __init__(self, tie=False, again=False):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block(again) for _ in range(4))
        self.last = nn.Linear(6, 6, bias=False)
        if tie:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stages_of(kind):
    shape, names = SHAPES[kind]
    return [ProcessMesh(torch.tensor(ranks).reshape(shape), names) for ranks in ([0, 1], [2, 3])]


pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv"]


def whole(x):
    return dt.broadcast_value(x.detach())


def check(stage, schedule, kind="fsdp", steps=2, segments=("blocks.*",), **how):
    torch.manual_seed(0)
    plain = Model(**how).double()
    torch.manual_seed(0)
    model = Model(**how).double()
    meshes = stages_of(kind)
    order = meshes
    if schedule in ("zbv", "dualpipev"):
        order = [*meshes, *reversed(meshes)]
    elif schedule.startswith("interleaved"):
        order = meshes * 2
    pipeline.split([model.first, *model.blocks, model.last], order, of=model)
    dt.shard_data_parallel(model, segments=list(segments), **ways(stage))
    opt, ref = sgd(model.parameters()), sgd(plain.parameters())
    split = [Shard(0)] * meshes[0].ndim
    logs = []
    for i in range(steps):
        data = [randn(2 + j % 3, 6, seed=10 * i + j) for j in range(5)]
        opt.zero_grad()
        ref.zero_grad()
        want = [plain(x).square().sum() for x in data]
        for loss in want:
            loss.backward()
        with dt.debugging.record_comms() as log:
            got = pipeline.run(
                lambda x: model(dt.shard_tensor(x, meshes[0], split)).square().sum(), data,
                schedule,
                stages=order if order is not meshes else None,
            )  # fmt: skip
            dt.sync_gradients(model)
        logs.append(log)
        compare([whole(x) for x in got], [x.detach() for x in want])
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            here = torch.zeros(()) if p.grad is None else torch.ones(())
            assert bool(here) is p.is_initialized, name
            if p.is_initialized:
                compare(full(p.grad), q.grad)
        opt.step()
        ref.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        compare(whole(p), q.detach())
    for segment in engine(model).segments:
        assert not segment.is_visible and not segment.busy
    return logs[-1]


@pytest.mark.parametrize(
    ("schedule", "stage", "kind"),
    part(
        [
            *itertools.product(SCHEDULES[:3], STAGES, SHAPES),
            *itertools.product(SCHEDULES[3:], STAGES, ["dp x fsdp"]),
        ],
        22,
        "schedules",
    ),
)
@on_ranks(4)
def test_schedules(schedule, stage, kind):
    log = check(stage, schedule, kind)
    over = [r.axis for r in log if r.kind in ("all_reduce", "reduce_scatter")]
    if kind == "dp x fsdp" and schedule in ("1f1b", "gpipe", "zero_bubble"):
        # replicas: one reduction for each segment of the stage, of all five micro-batches
        assert over == ["dp"] * 3, str(log)


HOW = [{"tie": True}, {"again": True}, {"tie": True, "again": True}]
EACH_HOW = [*itertools.product(["1f1b", "interleaved_1f1b"], STAGES, HOW)]


@pytest.mark.parametrize(("schedule", "stage", "how"), part(EACH_HOW, 12, "how"), ids=str)
@on_ranks(4)
def test_tied_and_recomputed(schedule, stage, how):
    check(stage, schedule, **how)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_a_v_tied_and_recomputed(stage):
    check(stage, "zbv", tie=True, again=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("again", [True, False])
@on_ranks(4)
def test_one_segment_for_each_stage(stage, again):
    torch.manual_seed(0)
    check(stage, "1f1b", segments=["first", "blocks.*", "last"], again=again)
