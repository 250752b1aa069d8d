"""Counts writes to the memory of a tensor. A result kept for a value (a reduction, a gathered copy,
an alias) is valid as long as the count is unchanged.

Autograd counts writes in ``_version``, with three exceptions: ``x.data`` has its own count,
inference tensors have none, and kernels outside autograd (fused optimizers, custom ops) change
none. The dispatcher counts such writes here, so all ranks count alike; the storage has the number
of the last one. Some writes are not counted at all, for example through another name after
``x.data``, or by NumPy after ``to_local()``. ``hand_out`` marks such memory: no reduction of a
pending value in it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

UNTRACKED = [0]  # the number of writes counted here, to any memory
INFERENCE: list[bool] = []  # not empty: some result is kept for an inference tensor


def version(local: torch.Tensor) -> int:
    """Returns a number that grows with each write to the memory of ``local``, also by views."""
    by_autograd = 0 if local.is_inference() else local._version
    if not UNTRACKED[0]:
        return by_autograd
    storage: Any = local.untyped_storage()
    return by_autograd + int(getattr(storage, "last_uncounted", 0))


def hand_out(local: torch.Tensor, twice: bool = False) -> None:
    """Marks memory of ``local`` that may be written to without a count. ``twice``: two DistTensors
    share it and count separately, after ``x.data = y``."""
    storage: Any = local.untyped_storage()
    storage.handed_out = twice or counts_twice(local)


def is_handed_out(local: torch.Tensor) -> bool:
    return hasattr(local.untyped_storage(), "handed_out")


def counts_twice(local: torch.Tensor) -> bool:
    return getattr(local.untyped_storage(), "handed_out", False)


def count(*locals_: torch.Tensor) -> None:
    """Counts a write to the memory of each tensor that autograd has not counted."""
    count_storages([local.untyped_storage() for local in locals_])


def count_storages(storages: Sequence[Any]) -> None:
    UNTRACKED[0] += len(storages)
    for storage in storages:
        storage.last_uncounted = UNTRACKED[0]
