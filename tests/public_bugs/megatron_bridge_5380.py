"""The embedding that predicts further tokens on a stage of its own drifted apart from the first
stage's.

NVIDIA-NeMo/Megatron-Bridge#5380, 2026-08-06, merged.

The copies of the embedding are kept alike by a group of ranks: the first stage and the last. The
stage in the middle was not in it.
"""

from torch import nn

from tests.public_bugs.harness import randint
from tests.public_bugs.models import MLP, Residual, next_token

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "sharding": 2}, {"pp": 2, "dp": 2}]}


class Further(nn.Module):
    """Adds the embedding of each token once more, by the weight of the first stage."""

    def __init__(self, embedding):
        super().__init__()
        self.embed, self.norm = embedding, nn.LayerNorm(6)

    def forward(self, both):
        x, tokens = both
        return self.norm(x + self.embed(tokens))


class First(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embed = embedding

    def forward(self, tokens):
        return self.embed(tokens), tokens


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Residual(MLP())

    def forward(self, both):
        return self.inner(both[0]), both[1]


def program(run):
    embedding = nn.Embedding(11, 6)
    layers = First(embedding), Middle(), Middle(), Further(embedding), nn.Linear(6, 11)
    model = run.apply(nn.Sequential(*layers))
    run.train(model, next_token, randint(11, 5, 4), randint(11, 5, 4, seed=1))
