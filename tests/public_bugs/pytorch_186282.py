"""Flattening and unflattening around a linear gave wrong shapes or gradients if two axes split the
sequence.

pytorch/pytorch#186282, 2026-06-04, open.

The rule for views assumed that one axis splits a dim.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, MLP_PLAN, spread, squares

STRATEGIES = {2: [{"cp": 2}], 4: [{"cp": 2, "tp": 2}]}
PEER_RANKS = 4


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = MLP(), nn.Linear(6, 6)

    def forward(self, x):
        x = spread(x)  # the sequence is split over cp and tp
        y = self.last(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.inner(y.reshape(-1, 6)).view(x.shape)


def program(run):
    run.train(run.apply(Flat(), MLP_PLAN), squares, randn(2, 8, 6))


def peer():
    x, mesh = randn(2, 8, 3), init_device_mesh("cpu", (2, 2))
    split = distribute_tensor(x, mesh, [Shard(1), Shard(1)])
    return split.flatten(0, 1).unflatten(0, (2, 8)).full_tensor(), x
