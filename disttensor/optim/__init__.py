"""Clipping and loss scaling over all meshes, hooks before an optimizer's step, and owners of whole
matrices.

Not here: the rules of the optimizers' own functions (``ops.foreach``).
"""

from disttensor.optim.grad_scaler import shard_scaler
from disttensor.optim.owned_step import own

__all__ = ["own", "shard_scaler"]
