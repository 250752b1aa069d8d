"""In a loss over pairs of the whole batch, each rank had the gradient of its own embeddings only.

KevinMusgrave/pytorch-metric-learning#302, 2021-04-12, open.

Embeddings of other ranks are gathered by a collective that has no gradient.
"""

import torch
import torch.nn.functional as F

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP

STRATEGIES = {
    2: [{"dp": 2}],
    4: [{"dp": 4}, {"sharding": 2, "tp": 2}, {"dp": 2, "sharding": 2}],
}


def pairs(x):
    """Two views of each row."""
    return x, x + 0.1 * x.roll(1, 1)


def loss(model, x):
    a, b = (F.normalize(model(view), dim=1) for view in pairs(x))
    return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(x)))


def program(run):
    run.train(run.apply(MLP()), loss, randn(5, 6), sequence=None)


def planted(run):
    def without_others(model, x):
        a, b = (F.normalize(model(view), dim=1) for view in pairs(x))
        return F.cross_entropy(a @ b.detach().t() / 0.2, torch.arange(len(x)))

    run.train(run.apply(MLP()), without_others, randn(5, 6), sequence=None)
