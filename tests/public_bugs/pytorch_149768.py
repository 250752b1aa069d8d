"""clip_grad_norm_ added its small constant once for each rank, so small gradients were clipped too
much.

pytorch/pytorch#149768, 2025-03-21, closed.

The norm of split gradients is a pending reduction, and a number was added to each part of it.
"""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randn, torch_mesh
from tests.public_bugs.models import MLP, squares

STRATEGIES = {2: [{"sharding": 2}, {"dp": 2}], 4: [{"sharding": 4}, {"sharding": 2, "tp": 2}]}


def program(run):
    model = run.apply(MLP())
    (squares(model, run.place(randn(5, 6))) * 1e-6).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-7)
    run.keep("norm in millionths", norm * 1e6)
    for p in model.parameters():
        p.grad.mul_(1e6)
    run.keep_gradients(model, 0)


def peer():
    gradient, mesh, got = randn(4, 3) * 1e-6, torch_mesh(), nn.Linear(3, 4, bias=False)
    got.weight = nn.Parameter(distribute_tensor(got.weight.detach(), mesh, [Shard(0)]))
    got.weight.grad = distribute_tensor(gradient.float(), mesh, [Shard(0)])
    torch.nn.utils.clip_grad_norm_(got.parameters(), 1e-7)
    want = gradient * 1e-7 / (gradient.norm() + 1e-6)
    return got.weight.grad.full_tensor() * 1e6, want * 1e6
