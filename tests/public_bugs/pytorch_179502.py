"""A view of a tensor that is split along its second dim had the elements in another order.

pytorch/pytorch#179502, 2026-04-06, open.

The rule for a dim that is flattened and split again took the result for an ordinary split, which
needs no communication.
"""

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import ROWS, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}
PEER_RANKS = 4


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(6, 6), nn.Linear(8, 6)

    def forward(self, x):
        y = self.inner(self.first(x).view(-1, 6))  # [12, 8] split by columns -> [16, 6]
        return self.last(y.view(-1, 8))


def program(run):
    model = run.apply(Viewed(), {"first.*": ROWS})
    run.train(model, squares, randn(12, 6), sequence=None)


def peer():
    x = randn(12, 8)
    return distribute_tensor(x, torch_mesh(), [Shard(1)]).view(16, 6).full_tensor(), x.view(16, 6)
