"""argmax along a split dim returned the largest of the ranks' own indices.

pytorch/pytorch#173936, 2026-01-30, closed.

Indices were treated like values, whose maximum over the ranks is the maximum.
"""

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tests.public_bugs.harness import randint, randn, torch_mesh
from tests.public_bugs.models import MLP, ROWS, Decoder

STRATEGIES = {2: [{"tp": 2}, {"dp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def program(run):
    """Greedy generation, with logits that are split by words."""
    model = run.apply(Decoder(MLP(), MLP()), {"head.weight": ROWS})
    tokens = run.place(randint(11, 5, 3), sequence=None)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    run.keep("tokens", tokens)


def peer():
    x = randn(4, 6)
    return distribute_tensor(x, torch_mesh(), [Shard(1)]).argmax(1).full_tensor(), x.argmax(1)
