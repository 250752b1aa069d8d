"""Muon's orthogonalization gave infinite values under FSDP.

MoonshotAI/Moonlight#27 (comment of 2025-04-18), closed.

The report gives no cause. The iteration needs the whole matrix, and a rank has a piece of it.
"""

import torch
from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, MLP_PLAN, squares

STRATEGIES = {
    2: [{"sharding": 2}, {"tp": 2}],
    4: [{"sharding": 4}, {"sharding": 2, "tp": 2}, {"dp": 2, "sharding": 2, "zero_stage": 1}],
}


class Muon(torch.optim.Optimizer):
    """Muon without momentum, in the dtype of the gradient."""

    def __init__(self, parameters):
        super().__init__([p for p in parameters if p.ndim == 2], {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(orthogonal(p.grad), alpha=-0.05)


def orthogonal(x):
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def program(run):
    model = run.apply(nn.Sequential(MLP(), MLP()), MLP_PLAN)
    run.train(model, squares, randn(5, 6), sequence=None, optimizer=Muon)
