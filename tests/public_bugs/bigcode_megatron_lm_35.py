"""Attention with one head of keys and values diverged after thousands of steps under tensor
parallelism.

bigcode-project/Megatron-LM#35, 2023-03-20, closed.

Each rank has some heads of queries and all keys, so the gradients of the keys are a sum over tp.
The sum was taken of parameters' gradients, without biases, and not where the heads meet.
"""

from tests.public_bugs.harness import randn
from tests.public_bugs.models import HEADS_PLAN, Attention, Residual, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {"*q.*": HEADS_PLAN["*q.*"], "*out.weight": HEADS_PLAN["*out.weight"]}


def program(run):
    model = run.apply(Residual(Attention(heads=3, kv=1)), PLAN)
    run.train(model, squares, randn(5, 4, 6), sequence=None)
