"""Rules. Layers and losses of neural networks."""

from ops.nn import (
    attention,
    conv,
    cross_entropy,
    embedding,
    halo,
    loss,
    normalization,
    pool,
    rnn,
    vision,
)

__all__ = [
    "attention",
    "conv",
    "cross_entropy",
    "embedding",
    "halo",
    "loss",
    "normalization",
    "pool",
    "rnn",
    "vision",
]
