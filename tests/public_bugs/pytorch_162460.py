"""The backward of an einsum over split letters had wrong gradients.

pytorch/pytorch#162460, 2025-09-09, closed.

copy_ between two pending sums reduced its source and kept the target's placement: the sum counted
once for each rank.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tests.public_bugs.harness import randn, rank, torch_mesh
from tests.public_bugs.models import COLUMNS, ROWS, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(randn(7, 6)), nn.Parameter(randn(6, 7))

    def forward(self, x):
        h = torch.einsum("td,hd->ht", x, self.up)
        return torch.einsum("ht,dh->td", h, self.down) / 10


def program(run):
    model = run.apply(Einsum(), {"up": ROWS, "down": COLUMNS})
    run.train(model, squares, randn(5, 6), sequence=None)


def peer():
    parts, mesh = randn(2, 4), torch_mesh()
    source = DTensor.from_local(parts[rank()], mesh, [Partial()])
    target = DTensor.from_local(torch.zeros(4, dtype=torch.float64), mesh, [Partial()])
    return target.copy_(source).full_tensor(), parts.sum(0)
