"""item() of a pending sum returned the part of the rank.

pytorch/pytorch#166638, 2025-10-30, open.

The number was read from the local tensor. The norm that clip_grad_norm_ returns is such a tensor.
"""

from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import clip_to_one, randn, torch_mesh
from tests.public_bugs.models import MLP, MLP_PLAN, squares

STRATEGIES = {2: [{"dp": 2}, {"sharding": 2}], 4: [{"dp": 4}, {"sharding": 2, "tp": 2}]}


def program(run):
    model = run.apply(MLP(), MLP_PLAN)
    loss = squares(model, run.place(randn(5, 6)))
    loss.backward()
    run.keep("item of the loss", loss.item())
    run.keep("item of the norm", clip_to_one(model.parameters()).item())
    run.keep("number of a bool", float(loss > 1e-3))


def peer():
    x = randn(5, 3)
    return distribute_tensor(x, torch_mesh(), [Shard(0)]).sum().item(), x.sum().item()
