"""The auxiliary loss over the global batch was too small by the degree of data parallelism.

NVIDIA/Megatron-LM#3769 (the report is #3672), 2026-03-10, closed.

Probabilities are those of a rank's tokens, and both factors were divided by the number of all
tokens.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.megatron_lm_5244 import loss
from tests.public_bugs.models import Decoder, Mixture

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}, {"dp": 2, "sharding": 2}, {"dp": 2, "tp": 2}]}


class Balanced(Mixture):
    """Keeps experts * sum(share of the tokens * mean probability), over the whole batch."""

    def forward(self, x):
        scores = self.router(x).softmax(-1).flatten(0, 1)
        chosen = scores.detach() >= scores.detach().topk(2).values[:, 1:]
        shares = chosen.double().mean(0) / 2
        self.balance = self.num_experts * (shares * scores.mean(0)).sum()
        return super().forward(x)


def program(run):
    model = run.apply(Decoder(Balanced(), Balanced()))
    run.train(model, loss, randint(11, 5, 3), randint(11, 5, 3, seed=1))
