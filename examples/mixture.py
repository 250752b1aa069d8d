"""A mixture of experts in place of a block's MLP: a router sends each token to two of them.

``dispatch_tokens`` works on regular tensors too: one process then has all experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disttensor.experts import combine_tokens, dispatch_tokens

CHOICES = 2  # experts of a token


class Mixture(nn.Module):
    """Experts of half the width of the MLP that they replace, in two tensors [experts, ...]."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same"""
        scores, chosen = self.router(x).softmax(-1).topk(min(CHOICES, len(self.up)))
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        self.sent = dispatch_tokens(x, chosen, len(self.up))  # kept for expert_load
        return combine_tokens(self.sent.apply(compute, self.up, self.down), weights)


def compute(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Returns the results of the experts of one rank for the rows that each has received."""
    each = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.gelu(r @ u) @ d for r, u, d in each])
