"""The replicated factor of a LoRA adapter was trained apart on each rank under tensor and sequence
parallelism, and one rank's copy was saved.

modelscope/mcore-bridge#173, 2026-08-26, merged.

With a split sequence its gradient is that of the rank's own tokens. The mark that makes Megatron
add them up was not set on adapters.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import COLUMNS, MLP, ROWS, Residual, spread, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {
    "*up.base.*": ROWS, "*up.b.weight": ROWS, "*down.base.weight": COLUMNS,
    "*down.a.weight": COLUMNS,
}  # fmt: skip


class Adapted(nn.Module):
    """base(x) + b(a(x)), where the base is frozen."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mlp = MLP()
        mlp.up, mlp.down = Adapted(mlp.up), Adapted(mlp.down)
        self.block = Residual(mlp)

    def forward(self, x):
        return spread(self.block(spread(x)))


def program(run):
    run.train(run.apply(Model(), PLAN), squares, randn(4, 5, 6))
