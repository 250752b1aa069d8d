"""Under sharded data parallelism gradients of experts were too large by the degree of expert
parallelism.

NVIDIA/Megatron-LM#5956, 2026-07-22, merged.

The average was taken over the replicas of an expert, whose tokens come from more ranks than these.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Mixture, Residual, shard_over_experts, squares

STRATEGIES = {
    2: [{"sharding": 2}],
    4: [{"sharding": 4}, {"dp": 2, "sharding": 2}, {"sharding": 2, "tp": 2, "zero_stage": 2}],
}


def program(run):
    model = nn.Sequential(Residual(Mixture()), Residual(Mixture()))
    run.train(run.apply(model, shard_over_experts("sharding")), squares, randn(5, 3, 6))
