"""The maximum of a pending sum was computed from its parts.

pytorch/pytorch#165962, 2025-10-21, closed.

Whether an argument may stay pending was decided by the split dims alone.
"""

import torch
from torch.distributed.tensor import DTensor, Partial

from tests.public_bugs.harness import randn, rank, torch_mesh
from tests.public_bugs.models import MLP, MLP_PLAN

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def loss(model, x):
    pending = torch.nn.functional.linear(torch.tanh(model.up(x)), model.down.weight)
    return pending.amax() + pending.max(1).values.sum() + model.down.bias.min()


def program(run):
    run.train(run.apply(MLP(), MLP_PLAN), loss, randn(5, 6))


def peer():
    parts = randn(2, 4)
    pending = DTensor.from_local(parts[rank()], torch_mesh(), [Partial()])
    return pending.max().full_tensor(), parts.sum(0).max()
