"""With context parallelism an auxiliary loss counted less than the loss by the degree.

NVIDIA/Megatron-LM#5244, 2026-06-09, merged.

The loss is multiplied by the degree, against a later average. The auxiliary loss enters the
backward elsewhere, where the factor was missing.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import Attention, Decoder, Mixture, next_token

STRATEGIES = {
    2: [{"cp": 2}],
    4: [{"cp": 2, "dp": 2}, {"cp": 2, "sharding": 2}],
}


class Balanced(Mixture):
    """Keeps the loss that balances the experts."""

    def forward(self, x):
        scores = self.router(x).softmax(-1).flatten(0, 1)
        self.balance = self.num_experts * scores.mean(0).square().sum()
        return super().forward(x)


def loss(model, tokens, labels):
    main = next_token(model, tokens, labels)
    return main + 0.5 * sum(m.balance for m in model.modules() if isinstance(m, Mixture))


def program(run):
    model = run.apply(Decoder(Attention(), Balanced()))
    run.train(model, loss, randint(11, 3, 7), randint(11, 3, 7, seed=1))
