"""With sequence parallelism and gradient accumulation, loss and gradients depended on the degree.

verl-project/verl#2857, 2025-08-01, open.

A larger degree means fewer data ranks and more micro-batches; the mean over the micro-batches was
that of one rank.
"""

from tests.public_bugs.transformers_35438 import program as accumulate

STRATEGIES = {
    2: [{"cp": 2, "attention": "heads"}],
    4: [{"cp": 2, "dp": 2}, {"cp": 2, "sharding": 2, "attention": "heads"}],
}


def program(run):
    """Three micro-batches of samples of different lengths."""
    accumulate(run)
