"""With sharding over one rank, several ranks trained models of their own.

verl-project/verl#7493, 2026-08-20, closed.

A group of one rank shards nothing, and the replicas were left without a reduction.
"""

from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, squares

STRATEGIES = {
    2: [{"sharding": 1, "zero_stage": 3}],
    4: [{"sharding": 1, "zero_stage": 3}, {"sharding": 1, "zero_stage": 1, "tp": 2}],
}


def program(run):
    run.train(run.apply(MLP()), squares, randn(5, 6), sequence=None)
