"""With pipeline stages each stage clipped its gradients by the norm of its own layers.

pytorch/torchtitan#596, 2024-10-01, closed.

torch's clip_grad_norm_ sees the parameters of a rank, and no placement says that others have more.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import LAYERS, MLP, Attention, Decoder, next_token

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "sharding": 2}, {"pp": 2, "tp": 2}]}


def program(run):
    model = run.apply(Decoder(Attention(), MLP()), layers=LAYERS)
    batch = randint(11, 6, 4), randint(11, 6, 4, seed=1)
    run.train(model, lambda m, *part: 5 * next_token(m, *part), *batch, parts=2)
