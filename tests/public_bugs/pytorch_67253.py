"""The gradient of a mean over a batch that the number of ranks does not divide weighted the rows of
ranks with fewer rows more.

pytorch/pytorch#67253, 2021-10-26, closed; also huggingface/transformers#608, 2019-05-14, closed.

Each rank takes the mean over its own rows, and DDP averages the gradients over the ranks.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.public_bugs.harness import randn, rank
from tests.public_bugs.models import MLP, squares

STRATEGIES = {2: [{"dp": 2}, {"sharding": 2}], 4: [{"dp": 4}, {"dp": 2, "sharding": 2}]}


def program(run):
    run.train(run.apply(MLP()), squares, randn(5, 6), sequence=None)


def planted(run):
    def mean_of_means(model, x):
        rows = torch.tensor([1 / 3] * 3 + [1 / 2] * 2) / 2  # 3 on rank 0, 2 on rank 1
        return ((model(x) - x).square().mean(1) * rows).sum()

    run.train(run.apply(MLP()), mean_of_means, randn(5, 6), sequence=None)


def peer():
    x, model = randn(5, 6).float(), nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    (want,) = torch.autograd.grad(model(x).square().mean(), model.weight)
    replica = DistributedDataParallel(model)
    replica(x.chunk(2)[rank()]).square().mean().backward()
    return model.weight.grad, want
