"""With a loss that is a sum over the batch, gradients were too small by the number of ranks.

pytorch/pytorch#37359, 2020-04-27, closed.

DDP always averages over the ranks, whatever the loss is.
"""

from tests.public_bugs.harness import ddp, randn
from tests.public_bugs.models import MLP

STRATEGIES = {2: [{"dp": 2}, {"sharding": 2}], 4: [{"dp": 4}, {"sharding": 2, "tp": 2}]}


def loss(model, x):
    return (model(x) - x).square().sum()


def program(run):
    run.train(run.apply(MLP()), loss, randn(5, 6), sequence=None)


def peer():
    return ddp(randn(4, 6), lambda y: y.square().sum())
