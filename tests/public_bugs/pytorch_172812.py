"""local_map returned tensors of another shape on each rank if the rows do not divide evenly.

pytorch/pytorch#172812, 2026-01-20, closed.

The global size of a result was taken for the rank's own size times the number of ranks.
"""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import disttensor as dt
from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}, {"dp": 2, "tp": 2}]}


class Local(nn.Linear):
    """The activation is local code."""

    def forward(self, x):
        y = super().forward(x)
        if not isinstance(y, dt.DistTensor):
            return torch.sin(y)
        return dt.local_map(torch.sin, out_placements=y.placements)(y)


def program(run):
    run.train(run.apply(nn.Sequential(Local(6, 7), Local(7, 6))), squares, randn(5, 6))


def peer():
    """The shape: a rank that reads the value dies, as the ranks send other sizes."""
    x, mesh = randn(5, 3), torch_mesh()
    sine = local_map(torch.sin, out_placements=[Shard(0)], device_mesh=mesh)
    shape = sine(distribute_tensor(x, mesh, [Shard(0)])).shape
    return torch.tensor(shape), torch.tensor(x.shape)
