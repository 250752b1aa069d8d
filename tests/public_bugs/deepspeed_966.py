"""The stages of ZeRO had different losses for a model with tied weights.

deepspeedai/DeepSpeed#966, 2021-04-16, open.

The report gives no cause. Each stage keeps gradients elsewhere: whole, in buckets, or as shards.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import squares

STRATEGIES = {
    2: [{"sharding": 2, "zero_stage": stage} for stage in (1, 2, 3)],
    4: [{"dp": 2, "sharding": 2, "zero_stage": stage} for stage in (1, 2, 3)],
}


def program(run):
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight, last.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), last)
    run.train(run.apply(model), squares, randn(5, 6), sequence=None)
