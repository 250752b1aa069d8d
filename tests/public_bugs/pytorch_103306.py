"""A tensor of 5 rows that was split and gathered again had 8 rows.

pytorch/pytorch#103306, 2023-06-09, open.

The report gives no cause. Over four ranks the pieces have 2, 2, 1 and 0 rows.
"""

from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import disttensor as dt
from tests.public_bugs.harness import randn, torch_mesh

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}]}
PEER_RANKS = 4


def program(run):
    x = run.shard(randn(5, 3), dt.Replicate(), requires_grad=True)
    y = x * 2
    if run.parallel:
        for placement in (dt.Shard(0), dt.Replicate(), dt.Shard(1), dt.Shard(0)):
            y = dt.reshard(y, run.line, [placement])
    (y.square().sum()).backward()
    run.keep("values", y)
    run.keep("gradient", x.grad)


def peer():
    x, mesh = randn(5, 3), torch_mesh()
    split = distribute_tensor(x, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    return split.redistribute(mesh, [Replicate()]).to_local(), x
