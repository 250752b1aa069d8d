"""Ranks that are out of step: what a reduction does next must not hang on when something
arrives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttensor import Strategy
from disttensor.fsdp.backward import ReduceOrder
from disttensor.fsdp.engine import Engine
from tests.parallel.test_strategy import PLAN, data, loss_of, net
from tests.support.pool import on_ranks

EACH = ["tok", "blocks.*", "head"]
KINDS = {
    "replicas of shards": {"dp": 2, "sharding": 2, "accumulate_steps": 2},
    "shards and tp": {"sharding": 2, "tp": 2},
    "replicas and tp": {"dp": 2, "tp": 2, "sharding": 1},
    "shards and recompute": {"dp": 2, "sharding": 2, "recompute": ["blocks.*"]},
}


def late(method: Callable[..., Any], draw: random.Random) -> Callable[..., Any]:
    """The method, sometimes some milliseconds later."""

    def call(*args: Any) -> Any:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.006)
        return method(*args)

    return call


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@on_ranks(4)
def test_ranks_out_of_step_train_like_one_process(kind):
    draw = random.Random(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceOrder, "record_gradient", late(ReduceOrder.record_gradient, draw))
        patch.setattr(Engine, "_module_begins", late(Engine._module_begins, draw))
        strategy = Strategy(segments=EACH, **kind)
        plain, model = net(), net()
        model, optimizer = strategy.apply(model, lambda p: torch.optim.SGD(p, lr=0.05), PLAN)
        one = torch.optim.SGD(plain.parameters(), lr=0.05)
        stage = strategy.stages()[0]
        for step in range(5):
            for i in range(strategy.accumulate_steps):
                batch = data(10 * step + i)
                with strategy.accumulate(model, i):
                    loss = loss_of(model, batch, stage, stage, strategy.batch())
                    loss.backward()
                want = loss_of(plain, batch)
                want.backward()
                torch.testing.assert_close(loss.full_tensor(), want)
            for each in (optimizer, one):
                each.step()
                each.zero_grad()
