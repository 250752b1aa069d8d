"""Norms on queries and keys drifted apart between ranks where forwards and backwards are separate
calls.

NVIDIA-NeMo/RL#3716, 2026-08-19, open.

The sum of replicated parameters' gradients over tp stands in a function at the end of Megatron's
step, and the split calls did not reach it.
"""

from tests.public_bugs.harness import randn
from tests.public_bugs.models import HEADS_PLAN, squares
from tests.public_bugs.torchtitan_2532 import NormedHeads

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}


def program(run):
    model = run.apply(NormedHeads(), HEADS_PLAN)
    run.train(model, squares, randn(6, 4, 6), sequence=None, parts=3)
