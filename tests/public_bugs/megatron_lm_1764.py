"""With context parallelism, the loss was not a number if all tokens of a rank were padding.

NVIDIA/Megatron-LM#1764, 2025-08-21, open.

Each rank divides by the number of its own tokens that count, which is zero here.
"""

from tests.public_bugs.harness import randint
from tests.public_bugs.models import Attention, Decoder, next_token

STRATEGIES = {2: [{"cp": 2}], 4: [{"cp": 4}, {"cp": 2, "dp": 2}, {"cp": 2, "tp": 2}]}


def program(run):
    labels = randint(11, 3, 8, seed=1)
    labels[:, 3:] = -100  # on two ranks the second has none, on four three ranks
    run.train(run.apply(Decoder(Attention())), next_token, randint(11, 3, 8), labels)
