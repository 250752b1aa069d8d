"""The gradient that a tensor-parallel mixture of experts passes to the layers below was that of one
rank.

pytorch/torchtitan#1805, 2025-10-07, closed.

All ranks read the same input and have different weights, so the gradient of the input is a sum over
the ranks. to_local declared it complete.
"""

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}
PLAN = {"*up": {"tp": dt.Shard(2)}, "*down": {"tp": dt.Shard(1)}}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(randn(3, 5, 7)), nn.Parameter(randn(3, 7, 5))

    def forward(self, x):
        return torch.bmm(F.silu(torch.bmm(x, self.up)), self.down)


class GradientOfOneRank(Experts):
    def forward(self, x):
        if isinstance(x, dt.DistTensor):
            R = x.placements
            up, down = self.up.placements, self.down.placements
            local = dt.local_map(
                lambda x, up, down: torch.bmm(F.silu(torch.bmm(x, up)), down),
                in_placements=[R, up, down], in_grad_placements=[R, up, down],
                out_placements=[*R[:3], dt.Partial()],
            )  # fmt: skip
            return local(x, self.up, self.down)
        return super().forward(x)


def program(run, experts=Experts):
    model = run.apply(nn.Sequential(nn.Linear(5, 5), experts()), PLAN)
    run.train(model, squares, randn(3, 4, 5), sequence=None)


def planted(run):
    program(run, GradientOfOneRank)
