"""The gradient of the bias of a row-parallel linear was too small by the degree of tensor
parallelism.

pytorch/torchtitan#4332, 2026-08-26, closed.

The bias was divided by the degree before the sum over the ranks, and autograd divided its gradient.
"""

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, MLP_PLAN, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def program(run):
    run.train(run.apply(MLP(), MLP_PLAN), squares, randn(5, 6), sequence=None)


def planted(run):
    model = run.apply(MLP(), MLP_PLAN)
    model.down.bias.register_hook(lambda gradient: gradient / 2)
    run.train(model, squares, randn(5, 6), sequence=None)
