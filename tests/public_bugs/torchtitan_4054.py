"""Gradients of the router and of all parameters below the experts were 1.5 to 2.2 times too small
under tensor parallelism without expert parallelism.

pytorch/torchtitan#4054, 2026-08-03, merged.

local_map took the placements of the inputs for those of their gradients. For a replicated input of
split experts that leaves out the sum over the ranks.
"""

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {"up": {"tp": dt.Shard(2)}, "down": {"tp": dt.Shard(1)}}


class Mixture(nn.Module):
    """Three experts for all tokens, weighted by a router; the experts are local code."""

    def __init__(self):
        super().__init__()
        self.below, self.router = nn.Linear(5, 5), nn.Linear(5, 3)
        self.up, self.down = nn.Parameter(randn(3, 5, 7)), nn.Parameter(randn(3, 7, 5))

    def forward(self, x):
        x = self.below(x)
        scores = self.router(x).softmax(-1)
        if not isinstance(x, dt.DistTensor):
            return experts(x, scores, self.up, self.down)
        out = [*x.placements[:3], dt.Partial()]  # gradients: by what the inputs are
        return dt.local_map(experts, out_placements=out)(x, scores, self.up, self.down)


def experts(x, scores, up, down):
    hidden = F.silu(torch.einsum("td,edh->teh", x, up))
    return torch.einsum("teh,ehd,te->td", hidden, down, scores)


def program(run):
    run.train(run.apply(Mixture(), PLAN), squares, randn(5, 5), sequence=None)
