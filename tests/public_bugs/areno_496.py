"""The first projections of multi-head latent attention had gradients that were multiplied by the
degree of tensor parallelism, in part.

inclusionAI/AReno#496, 2026-08-20, merged.

The second projection adds up the gradient of its input, and the trainer added up the gradients of
the replicated parameters once more. The rows of the shared key needed the second sum.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import Residual, squares
from tests.public_bugs.transformer_engine_1975 import PLAN, Latent

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 2, "dp": 2}, {"tp": 2, "sharding": 2}]}


def program(run):
    model = run.apply(nn.Sequential(Residual(Latent()), Residual(Latent())), PLAN)
    run.train(model, squares, randn(5, 3, 6), sequence=None)


def planted(run):
    model = run.apply(nn.Sequential(Residual(Latent()), Residual(Latent())), PLAN)
    model[0].inner.q_a.weight.register_hook(lambda gradient: gradient * 2)
    run.train(model, squares, randn(5, 3, 6), sequence=None)
