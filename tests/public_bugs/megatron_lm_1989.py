"""A gated delta net computed with parts of queries, keys and values mixed up under tensor
parallelism.

NVIDIA/Megatron-LM#1989 (comment of 2025-12-10), merged.

One projection holds them one after the other. Its rows were split evenly over the ranks, and each
rank then cut its rows as if it had a part of each.
"""

import torch.nn.functional as F
from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import COLUMNS, ROWS, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {"packed.*": ROWS, "out.weight": COLUMNS}


class Packed(nn.Module):
    """q and k of 2 heads of 3, v of 2 heads of 4, and a gate, in one projection."""

    def __init__(self):
        super().__init__()
        self.packed, self.out = nn.Linear(6, 6 + 6 + 8 + 8), nn.Linear(8, 6)

    def forward(self, x):
        *parts, gate = self.packed(x).split([6, 6, 8, 8], -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(y * F.silu(gate))


def program(run):
    run.train(run.apply(Packed(), PLAN), squares, randn(5, 4, 6), sequence=None)
