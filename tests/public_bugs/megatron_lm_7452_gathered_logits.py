"""The loss was too large by the logarithm of the number of ranks, and the gradient lost the target.

NVIDIA/Megatron-LM#7452, 2026-09-17, open.

Logits that had been gathered went to a loss which takes the last dim of its input for one rank's
part of the vocabulary.
"""

import torch
import torch.nn.functional as F

from tests.public_bugs.harness import randint
from tests.public_bugs.models import MLP, ROWS, Decoder, whole

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}
PEER = "megatron-core"


def loss(model, tokens, labels):
    logits = whole(model(tokens))  # gathered, on purpose
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def program(run):
    model = run.apply(Decoder(MLP()), {"head.weight": ROWS})
    run.train(model, loss, randint(11, 4, 5), randint(11, 4, 5, seed=1), sequence=None)


def peer():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    logits, label = torch.arange(4.0), torch.tensor(3)
    got = vocab_parallel_cross_entropy(logits.view(1, 1, 4).clone(), label.view(1, 1))
    return got.squeeze(), F.cross_entropy(logits, label)
