"""Gradient accumulation kept the last micro-batch only, for all layers but the embedding.

ServiceNow/Fast-LLM#550, 2026-06-30, closed.

Layers share the memory of their gradients. Each flush of it to the shard overwrote the sum so far
where data parallelism had one rank.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import LAYERS, MLP, Decoder, next_token

STRATEGIES = {
    2: [{"sharding": 2, "zero_stage": 2}, {"pp": 2, "zero_stage": 2}],
    4: [{"sharding": 4, "zero_stage": 2}, {"pp": 2, "sharding": 2, "zero_stage": 2}],
}


def loss(model, tokens, labels):
    return next_token(model, tokens, labels) / 3


def program(run):
    model = run.apply(Decoder(MLP(), MLP(), tied=True), layers=LAYERS)
    run.train(model, loss, randint(11, 6, 4), randint(11, 6, 4, seed=1), parts=3)
