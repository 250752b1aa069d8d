"""index_put wrote values to wrong rows if target and values are both split.

pytorch/pytorch#172350, 2026-01-13, open.

The rule lets both keep their split dim, although the indices say where a value belongs.
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"dp": 2}, {"tp": 2}], 4: [{"dp": 4}, {"dp": 2, "tp": 2}]}
ROWS, COLUMNS = torch.tensor([3, 0, 4, 1, 3]), torch.tensor([1, 5, 2, 2, 0])


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.values, self.last = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 6)

    def forward(self, x):
        y, values = self.first(x), self.values(x).squeeze(1)  # both split by rows
        return self.last(torch.tanh(y).index_put((ROWS, COLUMNS), values))


def program(run):
    run.train(run.apply(Written()), squares, randn(5, 6))


def peer():
    mesh = torch_mesh()
    x, values, where = randn(4, 4), randn(4, 1).flatten(), torch.tensor([3, 1, 0, 2])
    rows = distribute_tensor(where, mesh, [Replicate()])
    parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, values)]
    want = x.index_put((where, where), values)
    return parts[0].index_put((rows, rows), parts[1]).full_tensor(), want
