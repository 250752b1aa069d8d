"""The norm of a pending sum was the sum of the norms of its parts.

pytorch/pytorch#159856, 2025-08-05, closed.

The rule for norms let the argument be pending, as if a norm were linear.
"""

import torch
from torch.distributed.tensor import DTensor, Partial

from tests.public_bugs.harness import randn, rank, torch_mesh
from tests.public_bugs.models import MLP, MLP_PLAN

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def loss(model, x):
    """The result of the last layer is a sum over tp that is pending, but for the bias."""
    pending = torch.nn.functional.linear(model.up(x), model.down.weight)
    return torch.linalg.vector_norm(pending) + (model.down.bias - 1).norm()


def program(run):
    run.train(run.apply(MLP(), MLP_PLAN), loss, randn(5, 6))


def peer():
    parts = randn(2, 4)
    pending = DTensor.from_local(parts[rank()], torch_mesh(), [Partial()])
    return torch.linalg.vector_norm(pending).full_tensor(), parts.sum(0).norm()
