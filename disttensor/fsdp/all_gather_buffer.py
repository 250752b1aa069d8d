"""The memory of unsharded parameters: gathered in one all-gather, freed, and gathered again.

Autograd sees the same memory after each gather, so tensors saved by a forward are valid again in
the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from disttensor.comm import buffers, collectives
from disttensor.comm.groups import Group
from disttensor.comm.work import Work, finished
from disttensor.fsdp.param import FSDPParam
from disttensor.gradients.rows import BucketLayout
from disttensor.tensor.versions import is_shared, version
from disttensor.torch_private import set_versions

Tensor = torch.Tensor


class AllGatherBuffer:
    """The memory of the unsharded parameters of one dtype (and one group of ranks).
    ``uses_memory_pool``: few segments are gathered at once, so freed memory is kept for the next
    segment."""

    def __init__(
        self, params: Sequence[FSDPParam], dtype: torch.dtype, group: Group | None, *,
        uses_memory_pool: bool,
    ) -> None:  # fmt: skip
        self.params, self.group, self.uses_memory_pool = params, group, uses_memory_pool
        self.layout = BucketLayout([p.rows_shape for p in params], group.size if group else 1)
        device = params[0].spec.mesh.device
        self.memory = torch.empty(self.layout.n * self.layout.total, dtype=dtype, device=device)
        self.blocks = self.layout.blocks(self.memory)
        self.moved: list[tuple[FSDPParam, Tensor, Tensor]] = []  # parameters not split along dim 0
        for param, rows in zip(params, self.layout.tensors(self.memory), strict=True):
            whole = rows.view(param.spec.local_shape) if param.dim else rows
            param.use_memory(whole)
            if param.dim:
                self.moved.append((param, rows, whole))
        self.nbytes = self.memory.untyped_storage().nbytes()
        self.is_gathered = False
        self.custom: Any = None  # the user's all-gather
        self._arriving: tuple[Work[Tensor], Tensor, Any] | None = None
        self._gathered_versions: Any = None  # of the sharded parameters, at the last gather
        # of the unsharded parameters: their versions while they are gathered, as autograd counts
        # them, and with the writes that it does not count
        self._numbers = [1] * len(params)
        self._filled_at = self._numbers
        self.memory.untyped_storage().resize_(0)
        self.free()

    def is_current(self) -> bool:
        """Returns True if the last gather has the present values of the parameters."""
        return self._gathered_versions == self._versions() and not self._is_written_unseen()

    def _is_written_unseen(self) -> bool:
        """Returns True if writes to a parameter may not be counted: after ``p.data = y``, a write
        to y."""
        return any(is_shared(p.sharded_param.local) for p in self.params)

    def _versions(self) -> list[tuple[int, int]]:
        return [p.version() for p in self.params]

    def start(self) -> None:
        """Starts the all-gather."""
        if self._arriving is not None or self.is_gathered:
            return
        shards = [p.rows(p.sharded_param.local.detach()) for p in self.params]
        row = self.layout.pack_row(shards, self.memory.dtype)
        work = finished(row)
        out = row
        if self.group is not None:
            out = buffers.empty(self.memory.numel(), row.dtype, row.device, self.custom)
            work = collectives.start_async(
                collectives.all_gather, row, self.group, out=out, custom=self.custom
            )
        self._arriving = work, out, self._versions()

    def finish(self) -> None:
        if self.is_gathered:
            return
        early = self._arriving is not None
        self.start()
        out, versions = self._wait()
        # started before an optimizer step or another write: the values are stale
        if versions != self._versions() or (early and self._is_written_unseen()):
            self.start()
            out, versions = self._wait()
        earlier = self._gathered_versions or [None] * len(versions)
        self._allocate()
        with torch.no_grad():
            self.layout.unpack(out.view(self.layout.n, -1), self.blocks)
            for param, rows, whole in self.moved:
                whole.copy_(param.from_rows(rows.clone()))
        # Unchanged values are the values that autograd saved; else autograd must see a write.
        changed = [old != now for old, now in zip(earlier, versions, strict=True)]
        self._numbers = [n + c for n, c in zip(self._numbers, changed, strict=True)]
        self._set_versions(self._numbers)
        self._filled_at = self._unsharded_versions()
        self.is_gathered, self._gathered_versions = True, versions

    def _wait(self) -> tuple[Tensor, Any]:
        assert self._arriving is not None
        (work, out, versions), self._arriving = self._arriving, None
        work.wait()
        return out, versions

    def free(self) -> None:
        if self._arriving is not None:
            self._wait()
        storage = self.memory.untyped_storage()
        if self.uses_memory_pool:
            buffers.drain(storage)
        else:
            storage.resize_(0)
        self._set_versions([0] * len(self.params))  # a node that reads it now raises
        self.is_gathered = False

    def _allocate(self) -> None:
        storage = self.memory.untyped_storage()
        if not self.uses_memory_pool:
            storage.resize_(self.nbytes)
        elif not storage.nbytes():
            buffers.fill(storage, self.nbytes)

    def was_written(self) -> bool:
        """Returns True if the unsharded parameters were written to since the gather."""
        return self.is_gathered and self._unsharded_versions() != self._filled_at

    def _unsharded_versions(self) -> list[int]:
        return [version(p.unsharded_param.local) for p in self.params]

    def _set_versions(self, numbers: list[int]) -> None:
        set_versions(tuple(p.unsharded_param.local for p in self.params), tuple(numbers))
