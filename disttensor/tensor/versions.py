"""How often the memory of a tensor was written to. What is made of a value and kept beside it (a
reduction, a gathered copy, an alias) is read while this stays.

Autograd counts writes in ``_version``, but not all: ``x.data`` has a count of its own, inference
tensors have none, and kernels outside autograd (fused optimizers, custom ops) raise none. Such
writes are counted here when the dispatcher carries them out, so on all ranks alike, and the storage
has the number of the last one. Memory that may be written to in a way that neither counts, as
by another name after ``x.data`` or by NumPy after ``to_local()``, is marked (``hand_out``): of a
pending sum in it nothing is kept.
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


def hand_out(local: torch.Tensor, twice: bool = False) -> None:
    """From now on the memory of ``local`` may be written to without a count. ``twice``: two
    DistTensors have it that count apart, after ``x.data = y``."""
    storage: Any = local.untyped_storage()
    storage.handed_out = twice or counts_twice(local)


def is_handed_out(local: torch.Tensor) -> bool:
    return hasattr(local.untyped_storage(), "handed_out")


def counts_twice(local: torch.Tensor) -> bool:
    return getattr(local.untyped_storage(), "handed_out", False)


def count(*locals_: torch.Tensor) -> None:
    """The memory of each was written to, and autograd has not counted it."""
    UNCOUNTED[0] += len(locals_)
    for local in locals_:
        storage: Any = local.untyped_storage()
        storage.last_uncounted = UNCOUNTED[0]
