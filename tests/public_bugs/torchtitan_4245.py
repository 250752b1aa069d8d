"""The output bias of grouped experts was multiplied by the degree of tensor parallelism.

pytorch/torchtitan#4245, 2026-08-20, merged.

Each rank added the whole bias to its partial sum, and the partial sums were added up after it.
"""

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {"up": {"tp": dt.Shard(2)}, "up_bias": {"tp": dt.Shard(1)}, "down": {"tp": dt.Shard(1)}}


class Experts(nn.Module):
    """Three experts, 5 -> 7 -> 5, for tokens that are grouped already."""

    def __init__(self):
        super().__init__()
        self.up, self.up_bias = nn.Parameter(randn(3, 5, 7)), nn.Parameter(randn(3, 7))
        self.down, self.bias = nn.Parameter(randn(3, 7, 5)), nn.Parameter(randn(3, 5))

    def forward(self, x):
        hidden = F.silu(torch.bmm(x, self.up) + self.up_bias.unsqueeze(1))
        return self.finish(torch.bmm(hidden, self.down))

    def finish(self, y):
        return y + self.bias.unsqueeze(1)


class BiasOfEachRank(Experts):
    def finish(self, y):
        ranks = self.up.process_mesh.shape[-1]
        return y + ranks * self.bias.unsqueeze(1)


def program(run):
    run.train(run.apply(Experts(), PLAN), squares, randn(3, 4, 5), sequence=None)


def planted(run):
    run.train(run.apply(BiasOfEachRank(), PLAN), squares, randn(3, 4, 5), sequence=None)
