"""With tied weights whose rows do not divide evenly, the last rank never updated its rows.

pytorch/pytorch#176076, 2026-02-28, closed.

The report gives no cause. Since then torch refuses tied weights that are sharded as two groups.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.public_bugs.harness import randint, randn, sgd, torch_mesh
from tests.public_bugs.models import LAYERS, MLP, Decoder, next_token

STRATEGIES = {
    2: [{"sharding": 2, "segments": ["embed", "head"]}, {"sharding": 2, "segments": LAYERS}],
    4: [{"sharding": 4, "segments": ["embed", "head"]}, {"dp": 2, "sharding": 2}],
}


def program(run):
    """A vocabulary of 11 words."""
    model = run.apply(Decoder(MLP(), tied=True))
    run.train(model, next_token, randint(11, 5, 4), randint(11, 5, 4, seed=1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(randn(3, 2))
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def peer():
    """The weight after a step."""
    tokens, ends = torch.arange(3), []
    for sharded in (False, True):
        model = Tied()
        for module in (model.embed, model.head, model) if sharded else ():
            fully_shard(module, mesh=torch_mesh())
        steps = sgd(model.parameters())
        model(tokens).square().mean().backward()
        steps.step()
        ends.append(model.embed.weight.detach())
    return ends[1].full_tensor(), ends[0]
