"""With context parallelism, layers with a sliding window were trained as if they had none.

huggingface/accelerate#4177, 2026-08-20, merged (an error since then).

A hook before each attention replaced whatever mask it got by a causal one.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import Attention, Decoder, next_token

STRATEGIES = {
    2: [{"cp": 2}, {"cp": 2, "attention": "ring"}, {"cp": 2, "attention": "gather"}],
    4: [{"cp": 4, "attention": "ring"}, {"cp": 2, "sharding": 2}, {"cp": 2, "tp": 2}],
}
BATCH = randint(11, 3, 9), randint(11, 3, 9, seed=1)


def program(run):
    """Two layers see 3 tokens back, one sees all."""
    model = run.apply(Decoder(Attention(window=3), Attention(), Attention(window=3)))
    run.train(model, next_token, *BATCH)


def planted(run):
    model = run.apply(Decoder(Attention(window=3), Attention(), Attention(window=3)))
    for block in model.blocks:
        block.inner.window = 0
    run.train(model, next_token, *BATCH)
