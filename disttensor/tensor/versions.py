"""How often the memory of a tensor was written to. What is made of a value and kept beside it (a
reduction, a gathered copy, an alias) is read while this stays.

Autograd counts writes in ``_version``, but not all: ``x.data`` has a count of its own, inference
tensors have none, and kernels outside autograd (fused optimizers, custom ops) raise none. Such
writes are counted here when the dispatcher carries them out, so on all ranks alike, and the storage
has the number of the last one. Writes past the dispatcher, to what ``to_local()`` gave, are seen
where autograd counts them.
"""

from __future__ import annotations

from typing import Any

import torch

UNCOUNTED = [0]  # how many writes were counted here, to whatever memory
INFERENCE: list[bool] = []  # not empty: something is kept beside an inference tensor


def version(local: torch.Tensor) -> int:
    """Grows with each write to the memory of ``local``, through whatever shares it."""
    by_autograd = 0 if local.is_inference() else local._version
    if not UNCOUNTED[0]:
        return by_autograd
    storage: Any = local.untyped_storage()
    return by_autograd + int(getattr(storage, "last_uncounted", 0))


def count(*locals_: torch.Tensor) -> None:
    """The memory of each was written to, and autograd has not counted it."""
    UNCOUNTED[0] += len(locals_)
    for local in locals_:
        storage: Any = local.untyped_storage()
        storage.last_uncounted = UNCOUNTED[0]
