"""The norm of the gradient counted an embedding twice that is tied to the head on the last stage.

NVIDIA/Megatron-LM#7227, 2026-09-11, open.

The mark of a shared weight was lost when the weight was sharded.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import LAYERS, MLP, Decoder, next_token

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "sharding": 2}, {"pp": 2, "tp": 2}]}


def loss(model, tokens, labels):
    return 10 * next_token(model, tokens, labels)


def program(run):
    model = run.apply(Decoder(MLP(), MLP(), tied=True), layers=LAYERS)
    run.train(model, loss, randint(11, 5, 4), randint(11, 5, 4, seed=1))
