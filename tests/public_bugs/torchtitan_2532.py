"""The weight of a norm on queries and keys got the gradient of one rank's heads under tensor
parallelism.

pytorch/torchtitan#2532 (the report is #2217), 2026-03-09, closed.

A plain to_local on a mesh of two axes forgot that the weight is replicated over tp, and that its
gradient is a sum there.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import HEADS_PLAN, Attention, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 2, "dp": 2}, {"tp": 2, "sharding": 2}]}


class NormedHeads(Attention):
    def __init__(self):
        super().__init__(heads=4, kv=4, size=3)
        self.on_queries, self.on_keys = nn.RMSNorm(3), nn.RMSNorm(3)

    def prepare(self, q, k):
        return self.on_queries(q), self.on_keys(k)


def program(run):
    run.train(run.apply(NormedHeads(), HEADS_PLAN), squares, randn(5, 4, 6), sequence=None)
