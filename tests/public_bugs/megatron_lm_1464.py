"""With context parallelism, gradients of queries, keys and values were wrong by up to their size.

NVIDIA/Megatron-LM#1464, 2025-03-11, closed.

The attention that sends keys and values from rank to rank was right in the forward, and not in the
backward.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import HEADS_PLAN, Attention, Residual, squares

STRATEGIES = {
    2: [{"cp": 2, "attention": way} for way in ("ring", "gather", "heads")],
    4: [{"cp": 4, "attention": "ring"}, {"cp": 2, "tp": 2, "attention": "ring"}],
}


def program(run):
    """Four heads of queries to two of keys, 9 tokens."""
    model = nn.Sequential(Residual(Attention(4, 2)), Residual(Attention(4, 2)))
    run.train(run.apply(model, HEADS_PLAN), squares, randn(2, 9, 6))
