"""The norm of the gradient left out most experts with expert and tensor parallelism together.

NVIDIA/Megatron-LM#5916, 2026-07-23, merged.

A filter against counting replicas twice asked for the rank in the tensor-parallel group, over which
these experts are not replicated but divided.
"""

import torch
from torch import nn

from tests.public_bugs.harness import clip_to_one, randn
from tests.public_bugs.models import MLP, Mixture, Residual, shard_over_experts

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"dp": 2, "tp": 2}]}


def loss(model, x):
    return 50 * (model(x) - x).square().mean()  # so that the norm is clipped


def program(run, clip=clip_to_one):
    model = nn.Sequential(Residual(Mixture()), Residual(MLP()))
    run.train(run.apply(model, shard_over_experts("dp", "tp")), loss, randn(5, 3, 6), clip=clip)


def clip_without_other_experts(parameters):
    parameters = list(parameters)
    gradients = [p.grad.full_tensor() for p in parameters]
    seen = torch.stack([(g[:3] if g.ndim == 3 else g).norm() for g in gradients]).norm()
    for p in parameters:
        p.grad.mul_((1 / (seen + 1e-6)).clamp(max=1))
    return seen


def planted(run):
    program(run, clip_without_other_experts)
