"""The router of a mixture of experts got a wrong gradient under expert parallelism; the loss was
right.

huggingface/transformers#48687, 2026-09-10, closed.

The batched implementation computes with the experts of a rank, so each rank has a part of the
gradient of the scores, which was not added up.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Mixture, shard_over_experts, squares

STRATEGIES = {2: [{"tp": 2}, {"dp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


class Batched(Mixture):
    """Picks the weights of the experts of each token, and multiplies in batches."""

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        up, down = self.up[chosen], self.down[chosen]
        hidden = F.silu(torch.einsum("td,tkdh->tkh", tokens, up))
        y = torch.einsum("tkh,tkhd,tk->td", hidden, down, weights)
        return y.unflatten(0, x.shape[:-1])


def program(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), Batched()), shard_over_experts("tp"))
    run.train(model, squares, randn(5, 3, 6), sequence=None)
