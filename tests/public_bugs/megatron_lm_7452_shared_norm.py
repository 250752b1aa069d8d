"""A norm that all heads of a gated delta net share had other gradients on each rank.

NVIDIA/Megatron-LM#7452 (finding 11), 2026-09-17, open.

The weight is replicated and each rank has its own heads, so the gradient is a sum over tp. It was
added up only where sequence parallelism is on.
"""

import torch.nn.functional as F
from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import HEADS_PLAN, Attention, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = HEADS_PLAN | {"gate.*": HEADS_PLAN["*q.*"]}


class GatedHeads(Attention):
    """The result of each head is normed by one weight, and gated."""

    def __init__(self):
        super().__init__(heads=5, kv=5, size=3)
        self.gate, self.shared = nn.Linear(6, 15), nn.RMSNorm(3)

    def forward(self, x):
        self.gates = F.silu(self.gate(x)).unflatten(-1, (5, 3)).transpose(1, 2)
        return super().forward(x)

    def attend(self, q, k, v):
        return self.shared(super().attend(q, k, v)) * self.gates


def program(run):
    run.train(run.apply(GatedHeads(), PLAN), squares, randn(5, 4, 6), sequence=None)
