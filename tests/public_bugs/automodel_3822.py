"""Parameters that are replicated over tp began with other values on each rank.

NVIDIA-NeMo/Automodel#3822, 2026-09-05, merged.

Adapters are initialized after the model is split, when the ranks draw different numbers, and
nothing made the replicas alike.
"""

import torch

from tests.public_bugs.harness import randn, rank
from tests.public_bugs.models import MLP, MLP_PLAN, Residual, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def program(run):
    """A script whose ranks are seeded differently: the values of the first rank count."""
    if run.parallel:
        torch.manual_seed(rank())
    model = run.apply(Residual(MLP()), MLP_PLAN)
    run.train(model, squares, randn(5, 6), sequence=None)
