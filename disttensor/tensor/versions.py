"""Counts writes to the memory of a tensor. A value kept for a tensor (a reduction, an alias, a
gathered copy) is valid as long as the count is unchanged.

Autograd counts most writes in ``_version``, with three exceptions: ``x.data`` has its own count,
inference tensors have none, and kernels outside autograd (fused optimizers, custom ops) change
none. The dispatcher counts such writes here, so all ranks count alike; the storage has the number
of the last one. A count is compared for its own storage only: a number of the process would differ
between ranks, which write to tensors on meshes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

UNTRACKED = [0]  # the number of writes counted here, to any memory


def version(local: torch.Tensor) -> int:
    """Returns a number that grows with each write to the memory of ``local``, also by views."""
    by_autograd = 0 if local.is_inference() else local._version
    if not UNTRACKED[0]:
        return by_autograd
    storage: Any = local.untyped_storage()
    return by_autograd + int(getattr(storage, "last_uncounted", 0))


def count(*locals_: torch.Tensor) -> None:
    """Counts a write to the memory of each tensor that autograd has not counted."""
    count_storages([local.untyped_storage() for local in locals_])


def count_storages(storages: Sequence[Any]) -> None:
    UNTRACKED[0] += len(storages)
    for storage in storages:
        storage.last_uncounted = UNTRACKED[0]


def mark_shared(local: torch.Tensor) -> None:
    """Marks memory that two DistTensors share after ``x.data = y``: autograd counts the writes to
    each separately."""
    storage: Any = local.untyped_storage()
    storage.is_counted_apart = True


def is_shared(local: torch.Tensor) -> bool:
    return hasattr(local.untyped_storage(), "is_counted_apart")


def mark_storage_given_out(local: torch.Tensor) -> None:
    """Marks memory that this rank's user may write to in ways that nothing counts."""
    storage: Any = local.untyped_storage()
    storage.handed_out = True


def is_handed_out(local: torch.Tensor) -> bool:
    return hasattr(local.untyped_storage(), "handed_out")
