"""The position of a rank's piece was wrong for a dim that two axes split unevenly.

pytorch/pytorch#161368, 2025-08-24, open.

The report gives no cause. Checkpoints are written and read by these positions.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _utils, distribute_tensor

import disttensor as dt

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}]}
PEER_RANKS = 4


def program(run):
    """The numbers of the elements, 9 over all ranks, on a mesh of two axes where there are four."""
    x = torch.arange(9)
    if run.parallel:
        ranks = torch.distributed.get_world_size()
        mesh = dt.init_mesh((ranks // 2, 2), ("a", "b"))
        placed = dt.shard_tensor(x, mesh, [dt.Shard(0), dt.Shard(0)])
        begin, size = placed.spec.local_box.offset[0], placed.spec.local_shape[0]
        assert placed.to_local().tolist() == list(range(begin, begin + size))
        x = placed
    run.keep("numbers", x)


def peer():
    """Where the rank's piece begins, by its offset and by its first number."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(9.0), mesh, [Shard(0), Shard(0)])
    offset = _utils.compute_local_shape_and_global_offset(x.shape, mesh, x.placements)[1][0]
    return float(offset), x.to_local()[0]
