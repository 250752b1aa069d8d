"""Clipping and loss scaling over all meshes, and hooks before an optimizer's step.

Not here: the rules of the optimizers' own functions (``ops.foreach``).
"""

from disttensor.optim.grad_scaler import shard_scaler

__all__ = ["shard_scaler"]
