"""Under ZeRO 2 a loop that accumulates gradients by itself trained on its last micro-batch only.

allenai/open-instruct#1498, 2026-02-26, merged; also huggingface/accelerate#3877, 2025-12-05, open.

Each backward counted as the end of an accumulation, after which stage 2 forgets the sum so far.
"""

import os
from unittest import mock

import torch
from torch import nn

from tests.public_bugs.harness import full, randn, rank, sgd
from tests.public_bugs.models import MLP, Residual, squares

PEER = "deepspeed"
STRATEGIES = {
    2: [{"sharding": 2, "zero_stage": stage} for stage in (2, 1, 3)],
    4: [{"dp": 2, "sharding": 2, "zero_stage": stage} for stage in (2, 1, 3)],
}


def program(run):
    """Plain backwards, one after the other, and a step after the third."""
    model = run.apply(Residual(MLP()))
    steps = sgd(model.parameters())
    for part in randn(7, 6).chunk(3):
        loss = squares(model, run.place(part)) / 3
        loss.backward()
        run.keep("loss", loss)
    run.keep_gradients(model, 0)
    steps.step()
    for name, p in model.named_parameters():
        run.keep(name, full(p))


def peer():
    """The weight after a step of size 1."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank())) | {"WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, ranks):
        import deepspeed

        layer, rows = nn.Linear(3, 3, bias=False), torch.arange(1.0, 4.0)
        nn.init.zeros_(layer.weight)
        steps = torch.optim.SGD(layer.parameters(), lr=1.0)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config |= {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=layer, optimizer=steps, config=config)
        for value in rows:  # the same on both ranks
            engine.backward(engine(value.expand(1, 3)).sum())
        engine.step()
    return layer.weight, -rows.sum().expand(3, 3)
