"""In multi-head latent attention the key that all heads share got the gradient of one rank's heads.

NVIDIA/TransformerEngine#1975, 2025-07-21, open; also NVIDIA/Megatron-LM#6839, open.

The shared key is replicated and expanded over heads that are split, so its gradient is a sum over
tp. The backward of the gather took a slice.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import COLUMNS, ROWS, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {"*q_b.*": ROWS, "*kv_b.*": ROWS, "*out.weight": COLUMNS}


class Latent(nn.Module):
    """Five heads of size 3 + 2, where the last 2 of the key are the same for all heads."""

    def __init__(self):
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(6, 4), nn.RMSNorm(4), nn.Linear(4, 25)
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(6, 4 + 2), nn.RMSNorm(4), nn.Linear(4, 30)
        self.out = nn.Linear(15, 6)

    def forward(self, x):
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (5, 5)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([4, 2], -1)
        k, v = self.kv_b(self.kv_norm(latent)).unflatten(-1, (5, 6)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, 5, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def program(run):
    run.train(run.apply(Latent(), PLAN), squares, randn(5, 4, 6), sequence=None)
