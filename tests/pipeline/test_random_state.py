"""The random numbers of micro-batches that visit a mesh several times: each has its own, and all
ranks draw the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import disttensor as dt
from disttensor import pipeline
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_objects
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

SCHEDULES = {"interleaved_1f1b": [0, 1, 0, 1], "zbv": [0, 1, 1, 0]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_each_micro_batch_draws_its_own_numbers_and_all_ranks_the_same(schedule):
    order = [stage_meshes()[i] for i in SCHEDULES[schedule]]
    drawn, masks = {}, {}
    own, given = torch.Generator().manual_seed(3), torch.Generator()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        w = [dt.shard_tensor(randn(9, 9, seed=i), m, requires_grad=True) for i, m in
             enumerate(order)]  # fmt: skip

        def step(batch):
            number = int(batch[0, 0])
            x, numbers = dt.shard_tensor(batch, order[0]), []
            for i, mesh in enumerate(order):
                x = dt.reshard(x, mesh) if x.spec.mesh is not mesh else x
                kept = torch.nn.functional.dropout(dt.ones(64, mesh=mesh), 0.5)
                if kept.is_initialized:
                    masks[number, i] = tuple(kept.to_local().tolist())
                numbers += [torch.rand(()).item(), random.random(), np.random.rand()]
                numbers += [torch.rand((), generator=own).item()]
                of_mesh = dt.zeros(64, mesh=mesh).bernoulli_(0.5, generator=given)
                if of_mesh.is_initialized:
                    masks[number, i, "given"] = tuple(of_mesh.to_local().tolist())
                if random.random() < 0.5:  # a transfer there and back, or none
                    numbers += [torch.rand(()).item()]
                x = torch.tanh(x @ w[i])
            drawn[number] = numbers
            return (x**2).mean()

        batches = [randn(4, 9, seed=i) for i in range(6)]
        for i, batch in enumerate(batches):
            batch[0, 0] = i
        pipeline.run(step, batches, schedule, stages=order)
        after = torch.rand(()).item(), random.random(), np.random.rand()
        after += (*(torch.rand((), generator=g).item() for g in (own, given)),)
    ranks = gather_objects((drawn, after), world_group())
    assert ranks[0] == ranks[1] and len(drawn) == 6
    assert len({tuple(numbers) for numbers in drawn.values()}) == 6
    assert len(set(masks.values())) == len(masks) > 0


OWN = torch.Generator()
DRAWS = {
    "count": lambda: dt.rand(1, mesh=dt.init_mesh((2,), ("pp",))).full_tensor().item(),
    "torch": lambda: torch.rand(()).item(),
    "Python": random.random,
    "NumPy": np.random.rand,
    "own": lambda: torch.rand((), generator=OWN).item(),
}


@on_ranks(2)
def test_a_run_moves_the_generators_from_which_it_drew():
    order = [stage_meshes()[i] for i in SCHEDULES["zbv"]]

    def run(draw):
        def step(batch):
            x = dt.shard_tensor(batch, order[0]) * weight
            drawn.append(draw())
            for mesh in order[1:]:
                x = (dt.reshard(x, mesh) if x.spec.mesh is not mesh else x) * 2.0
            return x.sum()

        drawn: list[float] = []
        batch = torch.ones(2, 2)
        weight = dt.shard_tensor(batch, order[0], requires_grad=True)
        pipeline.run(step, [batch, batch], "zbv", stages=order)
        return drawn

    def numbers_after(draw):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            OWN.manual_seed(3)
            runs = [run(draw), run(draw)]
            return runs, [draw() for draw in DRAWS.values()]

    _, without = numbers_after(lambda: 0.0)
    for i, draw in enumerate(DRAWS.values()):
        (first, second), after = numbers_after(draw)
        assert len({*first, *second}) == 4
        assert [a != b for a, b in zip(after, without, strict=True)] == [i == k for k in range(5)]
