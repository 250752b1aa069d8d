"""A number that was added to a pending sum was added once for each rank.

pytorch/pytorch#163193, 2025-09-17, open.

The addition was a rule for all pointwise functions, and each rank added the number to its part.
"""

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import MLP, MLP_PLAN

STRATEGIES = {2: [{"dp": 2}, {"tp": 2}], 4: [{"dp": 4}, {"dp": 2, "tp": 2}]}


def loss(model, x):
    return torch.log(model(x).square().sum() + 10)


def program(run):
    run.train(run.apply(MLP(), MLP_PLAN), loss, randn(5, 6))


def peer():
    x = randn(5, 3)
    return (distribute_tensor(x, torch_mesh(), [Shard(0)]).sum() + 10).full_tensor(), x.sum() + 10
