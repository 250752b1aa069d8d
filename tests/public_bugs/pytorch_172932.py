"""to_local and from_local of a pending sum, one after the other, changed the gradient.

pytorch/pytorch#172932, 2026-01-21, open.

The gradient of a part of a pending sum is the whole gradient. to_local took it for another pending
sum, so it counted once for each rank.
"""

from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import disttensor as dt
from tests.public_bugs.harness import randn, torch_mesh

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}]}


def program(run):
    x = run.shard(randn(5, 3), dt.Shard(0), requires_grad=True)
    y = x.sum(0)  # pending
    if run.parallel:
        y = dt.from_local(y.to_local(), run.line, [dt.Partial()])
    loss = (y.square()).sum()
    loss.backward()
    run.keep("loss", loss)
    run.keep("gradient", x.grad)


def peer():
    x, mesh = randn(4, 3), torch_mesh()
    split = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    pending = split.sum(0)
    again = DTensor.from_local(pending.to_local(), mesh, pending.placements)
    again.square().sum().backward()
    return split.grad.full_tensor(), (2 * x.sum(0)).expand(4, 3)
