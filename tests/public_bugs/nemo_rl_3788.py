"""The norm of the gradient counted parameters that are replicated over tp once for each rank.

NVIDIA-NeMo/RL#3788, 2026-08-24, open; also ROCm/TransformerEngine#715, 2026-08-25, merged.

Squares were added up over the tensor-parallel group for all parameters, whether split or not.
"""

import torch

from tests.public_bugs.harness import clip_to_one, randn
from tests.public_bugs.models import MLP, MLP_PLAN, Residual, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def program(run, clip=clip_to_one):
    model = run.apply(Residual(MLP()), MLP_PLAN)
    run.train(model, squares, randn(5, 6), sequence=None, clip=clip)


def clip_with_replicas(parameters):
    own = torch.stack([p.grad.to_local().square().sum() for p in parameters]).sum()
    torch.distributed.all_reduce(own)
    return own.sqrt()


def planted(run):
    program(run, clip_with_replicas)
