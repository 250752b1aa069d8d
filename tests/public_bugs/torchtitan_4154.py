"""The bias that balances the experts was updated by the tokens of one rank of tensor parallelism.

pytorch/torchtitan#4154, 2026-08-14, merged.

Counts of tokens were added up over data and context ranks. Over tp the tokens are split too, by
sequence parallelism.
"""

import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import Mixture, each_expert, spread, squares

STRATEGIES = {2: [{"tp": 2}, {"dp": 2}], 4: [{"tp": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "dp": 2}]}


class Balanced(Mixture):
    """Chooses by score and bias; each forward moves the bias to the experts with fewer tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(5))

    def forward(self, x):
        x = spread(x)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        sent = dt.experts.dispatch_tokens(x, chosen, self.num_experts)
        counts = F.one_hot(chosen, self.num_experts).sum((0, 1, 2)).double()
        self.bias.add_(0.1 * (counts.mean() - counts).sign())
        computed = sent.apply(each_expert, self.up, self.down)
        return dt.experts.combine_tokens(computed, scores.gather(-1, chosen))


def program(run):
    model = run.apply(nn.Sequential(nn.Linear(6, 6), Balanced()))
    run.train(model, squares, randn(3, 5, 6))
    run.keep("bias", model[1].bias)
