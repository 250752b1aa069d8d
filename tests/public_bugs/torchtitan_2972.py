"""With pipeline stages, gradients were larger than without by the number of tokens.

pytorch/torchtitan#2972, 2026-04-15, open; the same in another trainer is #4194, 2026-08-18, merged.

The loss is a sum that is divided by the number of valid tokens; under the schedule this division
came after the backward.
"""

import torch.nn.functional as F

from tests.public_bugs.models import LAYERS, MLP, Decoder
from tests.public_bugs.trl_3231 import samples

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}]}


def program(run):
    tokens, labels = samples()
    valid = int((labels != -100).sum())

    def share(model, tokens, labels):
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / valid

    model = run.apply(Decoder(MLP(), MLP()), layers=LAYERS)
    run.train(model, share, tokens, labels, parts=5)
