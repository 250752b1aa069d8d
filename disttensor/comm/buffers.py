"""Large temporary tensors that each step needs again: on the CPU their memory is kept from step to
step.

The C library returns freed memory to the system or keeps it, by thresholds that depend on earlier
sizes; new memory from the system costs a page fault per page. So freed storages are kept here and
reused for requests of a similar size, once no tensor holds them. The memory kept is at most 5/4 of
the most in use at once, since not all sizes are in use together. Accelerators have a caching
allocator for this. Under a dispatch mode, which observes allocations, no memory is reused.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.cache import cached, fork_safe_lock
from disttensor.runtime import current_runtime, last_runtime
from disttensor.torch_private import dispatch_modes, fakes, swap_memory, users_of_storage

Tensor = torch.Tensor
_lock = fork_safe_lock()  # two threads must not take one storage


class Buffers:
    """The memory kept for one world. ``storages``: least recently used first. ``lent``: bytes that
    ``fill`` has taken from them. ``most``: the most bytes in use at once so far."""

    def __init__(self) -> None:
        self.storages: list[Any] = []
        self.lent = self.most = 0

    def take(self, nbytes: int) -> Any:
        """Returns a storage of at least ``nbytes`` bytes that no tensor holds."""
        found = self._reusable(nbytes, nbytes + nbytes // 8)
        if found is None and self._excess(nbytes) > 0:
            found = self._reusable(nbytes, 2 * nbytes)
        if found is None:
            self._make_room(nbytes)
            found = torch.UntypedStorage(nbytes, device="cpu")
            self.storages.append(found)
        return found

    def fill(self, storage: Any, nbytes: int) -> None:
        """Gives an empty storage memory of at least ``nbytes`` bytes."""
        swap_memory(storage, self.take(nbytes))
        self.storages.pop()
        self.lent += storage.nbytes()

    def drain(self, storage: Any) -> None:
        """Takes the memory of the storage back, which is empty afterwards."""
        self.lent = max(0, self.lent - storage.nbytes())
        memory = torch.UntypedStorage(0, device="cpu")
        swap_memory(memory, storage)
        self.storages.append(memory)

    def _reusable(self, nbytes: int, most: int) -> Any:
        """Returns the last used free storage of a size in this range, and moves it to the end."""
        storages = self.storages
        for i in range(len(storages) - 1, -1, -1):
            if nbytes <= storages[i].nbytes() <= most and is_free(storages, i):
                storages.append(storages.pop(i))
                return storages[-1]
        return None

    def _excess(self, nbytes: int) -> int:
        """Returns by how many bytes the limit is exceeded if ``nbytes`` more are kept."""
        sizes = [storage.nbytes() for storage in self.storages]
        used = [n for i, n in enumerate(sizes) if not is_free(self.storages, i)]
        self.most = max(self.most, sum(used) + self.lent + nbytes)
        return sum(sizes) + self.lent + nbytes - self.most * 5 // 4

    def _make_room(self, nbytes: int) -> None:
        """Drops the least recently used free storages until ``nbytes`` more fit in the limit."""
        excess, at = self._excess(nbytes), 0
        while excess > 0 and at < len(self.storages):
            if is_free(self.storages, at):
                excess -= self.storages.pop(at).nbytes()
            else:
                at += 1


def is_free(storages: list[Any], i: int) -> bool:
    """Returns True if only the list holds this storage."""
    return users_of_storage(storages, i) == _ALONE


_ALONE = users_of_storage([torch.UntypedStorage(1)], 0)


def current_buffers() -> Buffers:
    """Returns the Buffers of the current world."""
    now = current_runtime()
    if now.buffers is None:
        now.buffers = Buffers()
    return now.buffers


def empty(numel: int, dtype: torch.dtype, device: torch.device, custom: Any = None) -> Tensor:
    """Returns a temporary tensor [numel], uninitialized as ``torch.empty``. ``custom``: a
    collective of the user, which allocates it."""
    if custom is not None:
        return custom.allocate((numel,), dtype=dtype, device=device)
    if device.type != "cpu" or dispatch_modes():
        return torch.empty(numel, dtype=dtype, device=device)
    made, kept = torch.empty(0, dtype=dtype, device=device), current_buffers()
    with _lock:
        return made.set_(kept.take(numel * dtype.itemsize), 0, (numel,), (1,))


def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of these numbers, which is made once, because a CUDA graph cannot copy from
    the host. Do not write to it."""
    make = _made if fakes() is None else _made.__wrapped__  # type: ignore[attr-defined]
    return make(numbers, dtype, device)


@cached(256)
def _made(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def fill(storage: Any, nbytes: int) -> None:
    """Gives an empty storage memory of its own."""
    if storage.device.type == "cpu" and not dispatch_modes():
        with _lock:
            current_buffers().fill(storage, nbytes)
    else:
        storage.resize_(nbytes)


def drain(storage: Any) -> None:
    """Takes the memory of a storage that was filled; the storage is empty afterwards."""
    if storage.device.type == "cpu" and storage.nbytes() and not dispatch_modes():
        with _lock:
            current_buffers().drain(storage)
    else:
        storage.resize_(0)


def clear() -> None:
    """Drops all memory that is kept."""
    last_runtime().buffers = None
