"""Initial values and dropout masks depended on the number of ranks and on the dim that is split.

pytorch/pytorch#168058, 2025-11-18, open.

Each rank draws its piece from an offset of its own, in the order of the piece.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import disttensor as dt
from tests.public_bugs.harness import rank, torch_mesh

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}]}


def program(run):
    """One process is a mesh of one rank: the numbers are ours, not those of torch's generator."""
    mesh = run.line if run.parallel else dt.ProcessMesh([rank()], ("x",))
    dt.manual_seed(3)
    for dim in (0, 1):
        made = dt.randn(5, 7, mesh=mesh, placements=[dt.Shard(dim)])
        nn.init.trunc_normal_(weight := dt.empty(7, 5, mesh=mesh, placements=[dt.Shard(dim)]))
        with dt.random.rng("invariant"):
            dropped = F.dropout(made, 0.4)
        for name, value in {"randn": made, "init": weight, "dropout": dropped}.items():
            run.keep(f"{name}, split by dim {dim}", value)


def peer():
    got = []
    for dim in (0, 1):
        torch.manual_seed(0)
        x = distribute_tensor(torch.ones(4, 4), torch_mesh(), [Shard(dim)])
        got.append(F.dropout(x, 0.5).full_tensor())
    torch.manual_seed(0)
    want = F.dropout(torch.ones(4, 4), 0.5)
    return torch.stack(got), torch.stack([want, want])
