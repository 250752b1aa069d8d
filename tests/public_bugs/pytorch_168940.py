"""max along a split dim returned indices into the rank's own piece.

pytorch/pytorch#168940, 2025-11-24, closed.

The maximum of the parts was taken for values and for indices.
"""

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import ROWS, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


class Best(nn.Module):
    """The largest of seven units goes on, with the row of a table for its index."""

    def __init__(self):
        super().__init__()
        self.units, self.table = nn.Linear(6, 7), nn.Embedding(7, 6)

    def forward(self, x):
        values, indices = self.units(x).max(1)
        return values[:, None] * self.table(indices)


def program(run):
    run.train(run.apply(Best(), {"units.*": ROWS}), squares, randn(5, 6))


def peer():
    x = randn(4, 6)
    return distribute_tensor(x, torch_mesh(), [Shard(1)]).max(1)[1].full_tensor(), x.max(1)[1]
