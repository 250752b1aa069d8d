"""A pending mean times a number gave the result of the first such product, whatever the number.

pytorch/pytorch#153603, 2025-05-15, closed; also #147180, 2025-02-14, open.

The decisions for a call are kept by a key from which the number was missing.
"""

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import MLP, squares

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}, {"sharding": 2, "tp": 2}]}


def loss(model, x):
    mean = squares(model, x)
    return sum(mean * weight for weight in (2.0, -0.5, 0.25, -5.0, 7.0))


def program(run):
    run.train(run.apply(MLP()), loss, randn(5, 6))


def peer():
    x, weights = randn(4, 3), [2.0, -5.0, 0.5]
    mean = distribute_tensor(x, torch_mesh(), [Shard(0)]).mean()
    got = torch.stack([(mean * weight).full_tensor() for weight in weights])
    return got, torch.stack([x.mean() * weight for weight in weights])
