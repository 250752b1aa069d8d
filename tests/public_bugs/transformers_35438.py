"""Gradient accumulation gave another gradient than the same batch at once.

huggingface/transformers#35438 (comment of 2024-12-29), merged; also #34373, merged.

The number of tokens by which the loss of a micro-batch is divided was not that of the whole batch
on all ranks.
"""

import torch.nn.functional as F

from tests.public_bugs.models import LAYERS, Attention, Decoder
from tests.public_bugs.trl_3231 import samples

STRATEGIES = {
    2: [{"dp": 2}],
    4: [{"sharding": 4}, {"dp": 2, "sharding": 2}, {"pp": 2, "sharding": 2}],
}


def program(run):
    tokens, labels = samples()
    count = (labels != -100).sum()

    def share(model, tokens, labels):
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count

    model = run.apply(Decoder(Attention()), layers=LAYERS)
    run.train(model, share, tokens, labels, parts=3)  # of 2, 2 and 1 samples


def planted(run):
    def share(model, tokens, labels):
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 3

    run.train(run.apply(Decoder(Attention())), share, *samples(), parts=3)
