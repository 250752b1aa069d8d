"""The last norm of a model had other gradients on each rank under tensor and sequence parallelism.

NVIDIA/Megatron-LM#1446, 2025-03-04, closed.

Under sequence parallelism each rank's gradient is that of its own tokens. Nothing added up the
gradients of this norm over the ranks.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, MLP_PLAN, Residual, spread, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.last = Residual(MLP()), nn.LayerNorm(6)

    def forward(self, x):
        return self.last(spread(self.block(spread(x))))


def program(run):
    run.train(run.apply(Model(), MLP_PLAN), squares, randn(4, 5, 6))
