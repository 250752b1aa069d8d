"""The backward of ring attention used the keys and values of the first step in all steps.

huggingface/diffusers#14265, 2026-07-21, closed.

Keys and values are passed around in local variables; the function that computes gradients reads the
tensors that the forward had saved.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Attention, Residual, squares

STRATEGIES = {
    2: [{"cp": 2, "attention": "ring"}],
    4: [{"cp": 4, "attention": "ring"}, {"cp": 2, "sharding": 2, "attention": "ring"}],
}


class BothWays(Attention):
    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


def program(run):
    model = run.apply(nn.Sequential(Residual(BothWays()), Residual(BothWays())))
    run.train(model, squares, randn(2, 9, 6))
