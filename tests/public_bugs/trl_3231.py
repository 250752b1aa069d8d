"""The weight of a token in the loss depended on which rank its sample was on.

huggingface/trl#3231, 2025-04-04, closed; the cure is huggingface/trl#3938, 2025-08-22, merged.

The loss of each rank, and of each micro-batch, was divided by the number of its own tokens.
"""

import torch

from tests.public_bugs.harness import randint
from tests.public_bugs.models import LAYERS, Attention, Decoder, next_token

STRATEGIES = {
    2: [{"dp": 2}],
    4: [{"dp": 4}, {"sharding": 2, "tp": 2}, {"pp": 2, "dp": 2}],
}


def samples():
    """Five samples of 6 tokens; of sample i only the first i + 1 count."""
    labels = randint(11, 5, 6, seed=1)
    counts = torch.arange(6) <= torch.arange(5)[:, None]
    return randint(11, 5, 6), labels.where(counts, -100)


def program(run):
    run.train(run.apply(Decoder(Attention()), layers=LAYERS), next_token, *samples())
