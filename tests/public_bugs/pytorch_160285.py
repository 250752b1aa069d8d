"""Gradients of experts were twice too large with two ranks of expert parallelism.

pytorch/pytorch#160285, 2025-08-10, open.

The report gives no cause. Each expert has its tokens from all ranks, so its gradient is the sum
over the batch already.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Mixture, shard_over_experts, squares

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}, {"dp": 2, "tp": 2}]}


def program(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), Mixture()), shard_over_experts("dp"))
    run.train(model, squares, randn(5, 3, 6), sequence=None)


def planted(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), Mixture()), shard_over_experts("dp"))
    model[1].up.register_hook(lambda gradient: gradient * 2)
    model[1].down.register_hook(lambda gradient: gradient * 2)
    run.train(model, squares, randn(5, 3, 6), sequence=None)
