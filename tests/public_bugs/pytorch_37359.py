"""With a loss that is a sum over the batch, gradients were too small by the number of ranks.

pytorch/pytorch#37359, 2020-04-27, closed.

DDP always averages over the ranks, whatever the loss is.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.public_bugs.harness import randn, rank
from tests.public_bugs.models import MLP

STRATEGIES = {2: [{"dp": 2}, {"sharding": 2}], 4: [{"dp": 4}, {"sharding": 2, "tp": 2}]}


def loss(model, x):
    return (model(x) - x).square().sum()


def program(run):
    run.train(run.apply(MLP()), loss, randn(5, 6), sequence=None)


def peer():
    x, model = randn(4, 6).float(), nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    (want,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    replica = DistributedDataParallel(model)
    replica(x.chunk(2)[rank()]).square().sum().backward()
    return model.weight.grad, want
