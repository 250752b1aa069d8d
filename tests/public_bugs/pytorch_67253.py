"""The gradient of a mean over a batch that the number of ranks does not divide weighted the rows of
ranks with fewer rows more.

pytorch/pytorch#67253, 2021-10-26, closed; also huggingface/transformers#608, 2019-05-14, closed.

Each rank takes the mean over its own rows, and DDP averages the gradients over the ranks.
"""

import torch

from tests.public_bugs.harness import ddp, randn
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
    return ddp(randn(5, 6), lambda y: y.square().mean())
