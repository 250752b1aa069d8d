"""With sequence parallelism by heads, gradients were scaled by the number of ranks of a sequence.

deepspeedai/DeepSpeed#5248, 2024-03-09, open; for ZeRO 0 it is #5555, 2024-05-21, merged.

Gradients are averaged over data and sequence ranks together, in some configurations divided and in
others not.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Attention, Residual, squares

STRATEGIES = {
    2: [{"cp": 2, "attention": "heads"}],
    4: [
        {"cp": 4, "attention": "heads"},
        {"cp": 2, "dp": 2, "attention": "heads"},
        {"cp": 2, "sharding": 2, "zero_stage": 1, "attention": "heads"},
        {"cp": 2, "sharding": 2, "zero_stage": 3, "attention": "heads"},
    ],
}


def program(run):
    """Three heads, so that no number of ranks divides them."""
    model = nn.Sequential(Residual(Attention()), Residual(Attention()))
    run.train(run.apply(model), squares, randn(3, 7, 6))
