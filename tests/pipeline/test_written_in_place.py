"""Tensors that go from stage to stage and are written in place afterwards, on either side."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import pipeline
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

ORDERS = {
    "gpipe": [0, 1], "1f1b": [0, 1], "zero_bubble": [0, 1], "interleaved_1f1b": [0, 1, 0, 1],
    "zbv": [0, 1, 1, 0], None: [0, 1, 0, 1],
}  # fmt: skip


def program(w, ways, meshes, again):
    """``again``: a part after each transfer is recomputed, and writes to what it received."""

    def to(x, way, other):
        if way == other:
            return x
        return dt.reshard(x, meshes[other]) if meshes else x.clone()

    def layer(x, i):
        moved = i and ways[i - 1] != ways[i]
        x = to(x, ways[max(0, i - 1)], ways[i])
        return torch.tanh(x.mul_(2) if again and moved else x) @ w[i]

    def step(batch):
        x = dt.shard_tensor(batch, meshes[0]) if meshes else batch
        skips = []
        for i, way in enumerate(ways):
            x = checkpoint(layer, x, i, use_reentrant=False) if again else layer(x, i)
            if way != ways[-1]:
                skips.append(to(x, way, ways[-1]))
            relu(x, inplace=True)
        return sum(((i + 1) * s**2).sum() for i, s in enumerate(skips)) + x.sum()

    return step


@pytest.mark.filterwarnings("ignore:pipeline.run. stage . could not defer")
@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_gradients_are_those_of_the_values_that_were_sent(schedule):
    ways, meshes = ORDERS[schedule], stage_meshes()
    order = [meshes[way] for way in ways]
    batches = [randn(4, 9, seed=i) for i in range(4)]
    for again in (False, True):
        plain = [randn(9, 9, seed=9 + i).requires_grad_() for i in range(len(order))]
        want = [program(plain, ways, None, again)(batch) for batch in batches]
        for loss in want:
            loss.backward()
        w = [
            dt.shard_tensor(p.detach(), mesh, requires_grad=True)
            for p, mesh in zip(plain, order, strict=True)
        ]
        step = program(w, ways, meshes, again)
        if schedule is None:
            losses = [step(batch) for batch in batches]
            for loss in losses:
                loss.backward()
        else:
            stages = order if len(order) > 2 else None
            losses = pipeline.run(step, batches, schedule, stages=stages)
        for x, p in zip([*losses, *w], [*want, *plain], strict=True):
            if x.is_initialized:
                torch.testing.assert_close(x.detach().to_local(), p.detach())
                if p.is_leaf:
                    torch.testing.assert_close(x.grad.to_local(), p.grad)
