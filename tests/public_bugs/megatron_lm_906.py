"""With context parallelism, loss and gradients were scaled by the number of ranks of a sequence.

NVIDIA/Megatron-LM#906, 2024-07-07, closed; also #673, closed.

The loss is multiplied by the degree, and the average over the ranks divides by it, or not,
depending on the group that it is taken over.
"""

from tests.public_bugs.models import Attention, Decoder, next_token
from tests.public_bugs.trl_3231 import samples

STRATEGIES = {
    2: [{"cp": 2}],
    4: [{"cp": 4}, {"cp": 2, "dp": 2}, {"cp": 2, "sharding": 2, "zero_stage": 2}],
}


def program(run):
    """Ranks of a sequence have different numbers of tokens with a label."""
    run.train(run.apply(Decoder(Attention())), next_token, *samples())
