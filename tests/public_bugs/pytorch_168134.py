"""A weight whose rows are split over two axes in turn had wrong pieces if the sizes are uneven.

pytorch/pytorch#168134, 2025-11-19, open.

Sharding of a tensor-parallel weight is a split with a stride. Its pieces were computed as if each
part were as long as the first.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, ROWS, squares

STRATEGIES = {2: [{"tp": 2}, {"sharding": 2}], 4: [{"tp": 2, "sharding": 2}]}
PEER_RANKS = 4


def program(run):
    """5 units over tp, and each rank's over sharding."""
    run.train(run.apply(MLP(6, 5), {"up.*": ROWS}), squares, randn(5, 6))


def peer():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model, want = nn.Sequential(nn.Linear(6, 5, bias=False)), randn(5, 6)
    model[0].weight.data = want.clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model[0].weight.full_tensor(), want
