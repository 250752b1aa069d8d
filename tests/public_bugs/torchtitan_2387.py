"""Under tensor parallelism the router of a mixture of experts had other weights on each rank after
one step.

pytorch/torchtitan#2387, 2026-02-17, closed.

The scores left the DTensor by to_local, whose gradient was declared complete. Each rank had the
gradient of its own experts only, and nothing added them up.
"""

import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import Mixture, shard_over_experts, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}


def program(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), Mixture()), shard_over_experts("tp"))
    run.train(model, squares, randn(5, 3, 6), sequence=None)


class OwnScores(Mixture):
    """Each rank computes with its experts, and keeps the gradient of the scores to itself."""

    def forward(self, x):
        R, mesh = [dt.Replicate()] * 4, self.up.process_mesh
        inner = dt.local_map(
            self.own, in_placements=[R, R, self.up.placements, self.down.placements],
            in_grad_placements=[R, R, self.up.placements, self.down.placements],
            out_placements=[[*R[:3], dt.Partial()]], device_mesh=mesh,
        )  # fmt: skip
        return inner(x, self.router(x).softmax(-1), self.up, self.down)[0]

    def own(self, x, scores, up, down):
        weights, chosen = scores.topk(2)
        kept = scores.new_zeros(scores.shape).scatter(-1, chosen, weights)
        first = self.up.process_mesh.coordinate[3] * 3
        y = sum(kept[..., first + i, None] * (F.silu(x @ up[i]) @ down[i]) for i in range(len(up)))
        return [y]


def planted(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), OwnScores()), shard_over_experts("tp"))
    run.train(model, squares, randn(5, 3, 6), sequence=None)
