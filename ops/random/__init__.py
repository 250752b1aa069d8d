"""Rules. Functions that draw random numbers."""

from ops.random import dropout, fill, sampling

__all__ = ["dropout", "fill", "sampling"]
