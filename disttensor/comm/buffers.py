"""Large tensors that are needed for a moment, in each step again: on the host they lie in memory
that is kept from one to the next.

What is freed there goes back to the system or not by thresholds of the C library, which move with
the sizes that it has seen; what comes from the system costs a fault for each page. So memory stays
here, and is given to the next who needs about as much, once nobody else holds it. At most a quarter
more is kept than was in use at once: not all sizes are in use at one time. An accelerator has a
caching allocator, which does the same; and who watches operators sees tensors come and go.
"""

from __future__ import annotations

from typing import Any

import torch

from disttensor.runtime import current_runtime, last_runtime
from disttensor.torch_private import dispatch_modes, swap_memory, users_of_storage

Tensor = torch.Tensor


class Buffers:
    """The memory that one world keeps. ``storages``: those used last come last. ``lent``: bytes
    that ``fill`` has taken from them. ``most``: bytes in use at once, so far."""

    def __init__(self) -> None:
        self.storages: list[Any] = []
        self.lent = self.most = 0

    def take(self, nbytes: int) -> Any:
        """A storage of at least so many bytes, that nobody else holds."""
        found = self._reusable(nbytes, nbytes + nbytes // 8)
        if found is None and self._excess(nbytes) > 0:
            found = self._reusable(nbytes, 2 * nbytes)
        if found is None:
            self._make_room(nbytes)
            found = torch.UntypedStorage(nbytes, device="cpu")
            self.storages.append(found)
        return found

    def fill(self, storage: Any, nbytes: int) -> None:
        """Give an empty storage memory of at least so many bytes."""
        swap_memory(storage, self.take(nbytes))
        self.storages.pop()
        self.lent += storage.nbytes()

    def drain(self, storage: Any) -> None:
        """Take it back. The storage is empty then."""
        self.lent = max(0, self.lent - storage.nbytes())
        kept = torch.UntypedStorage(0, device="cpu")
        swap_memory(kept, storage)
        self.storages.append(kept)

    def _reusable(self, nbytes: int, most: int) -> Any:
        """The one that was used last, of those that are free and of such a size; it is last
        then."""
        storages = self.storages
        for i in range(len(storages) - 1, -1, -1):
            if nbytes <= storages[i].nbytes() <= most and _is_free(storages, i):
                storages.append(storages.pop(i))
                return storages[-1]
        return None

    def _excess(self, nbytes: int) -> int:
        """How many bytes are too many with so many more."""
        sizes = [storage.nbytes() for storage in self.storages]
        used = [n for i, n in enumerate(sizes) if not _is_free(self.storages, i)]
        self.most = max(self.most, sum(used) + self.lent + nbytes)
        return sum(sizes) + self.lent + nbytes - self.most * 5 // 4

    def _make_room(self, nbytes: int) -> None:
        """Drop what has not been used for longest, until so many more are not too many."""
        excess, at = self._excess(nbytes), 0
        while excess > 0 and at < len(self.storages):
            if _is_free(self.storages, at):
                excess -= self.storages.pop(at).nbytes()
            else:
                at += 1


def _is_free(storages: list[Any], i: int) -> bool:
    """Does only the list hold this storage?"""
    return users_of_storage(storages[i]) == _ALONE


_ALONE = next(users_of_storage(some[0]) for some in [[torch.UntypedStorage(1)]])


def kept() -> Buffers:
    """What the world of now keeps."""
    now = current_runtime()
    if now.buffers is None:
        now.buffers = Buffers()
    found: Buffers = now.buffers
    return found


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[numel], for a moment: as of ``torch.empty``."""
    if device.type != "cpu" or dispatch_modes():
        return torch.empty(numel, dtype=dtype, device=device)
    storage = kept().take(numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def fill(storage: Any, nbytes: int) -> None:
    """Give an empty storage memory of its own."""
    if storage.device.type == "cpu" and not dispatch_modes():
        kept().fill(storage, nbytes)
    else:
        storage.resize_(nbytes)


def drain(storage: Any) -> None:
    """Take the memory of a storage that was filled: it is empty then."""
    if storage.device.type == "cpu" and storage.nbytes() and not dispatch_modes():
        kept().drain(storage)
    else:
        storage.resize_(0)


def clear() -> None:
    """Keep nothing: who needed it is gone."""
    last_runtime().buffers = None
