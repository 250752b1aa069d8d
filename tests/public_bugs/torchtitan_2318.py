"""The norm of the gradient differed by a factor of 8 between replicas and shards.

pytorch/torchtitan#2318, 2026-02-03, open.

The report names the change after which the two differ.
"""

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, Residual

STRATEGIES = {
    2: [{"dp": 2}, {"sharding": 2}],
    4: [{"dp": 4}, {"dp": 2, "sharding": 2}, {"sharding": 4}, {"sharding": 4, "zero_stage": 1}],
}


def loss(model, x):
    return 30 * (model(x) - x.flip(1)).square().mean()  # so that the norm is clipped


def program(run):
    run.train(run.apply(Residual(MLP())), loss, randn(5, 6), sequence=None)
