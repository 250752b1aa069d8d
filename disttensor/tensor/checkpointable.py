"""DistTensor in torch.distributed.checkpoint: the pieces that this rank writes and reads.

The protocol is torch's, and its DTensor has the same: so does a file, which any mesh can read.
Ranks that hold the same piece all offer it; torch's planner has one of them write it, and evens out
what each rank writes. A rank outside the mesh offers and wants nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from disttensor.core.layout import Box, Layout
from disttensor.core.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.reshard import resharded

Tensor = torch.Tensor


def settled(spec: DistSpec) -> DistSpec:
    """``spec`` where each local is a box of the value; else without what is pending, and without
    the axes that a user's own placements cut in another way."""
    layout = spec.layout
    if not layout.partial and not layout.own:
        return spec
    own = {axis for axis, _ in layout.own}
    return spec.with_layout(
        Layout(tuple(tuple(a for a in axes if a not in own) for axes in layout.dims))
    )


def has_box(x: MeshTensor) -> bool:
    """Does this rank hold some of the value? Of a value without elements, each rank of the mesh
    does."""
    return x.is_initialized and (0 not in x.local.shape or 0 in x.spec.shape)


def prepare_to_read(x: MeshTensor) -> Box | None:
    """The box that a file is to give, straight into the local, or None. All ranks of the mesh count
    it as a write, those whose piece is empty too. Raises RuntimeError where a write to the local is
    none to the value."""
    spec, state = x.spec, x._view_state
    if settled(spec) is not spec or (state is not None and state.func is not None):
        raise RuntimeError(
            f"a checkpoint cannot be read into {spec!r}: its local is no piece of the value's own "
            "memory (it is pending, placed by a type of yours, or a copy in the place of a view). "
            f"Read into a tensor of {settled(spec)!r}, and reshard that"
        )
    if x.is_initialized and not x.local.is_inference():
        torch.autograd.graph.increment_version(x.local)
    x.forget_uses()
    return spec.local_box if has_box(x) else None


class Checkpointable(MeshTensor):
    _settled: Any = None  # what is written in the place of a value that is still pending

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What to write. Every rank of the mesh must make the call: what is pending is reduced."""
        planner: Any = import_module("torch.distributed.checkpoint.planner")
        metadata: Any = import_module("torch.distributed.checkpoint.metadata")
        if self._view_state is not None:
            views.check(self)
        x: MeshTensor = self
        dst = settled(self.spec)
        if dst is not self.spec:
            with torch.no_grad():
                x = self._settled = resharded(self, dst)
        if not has_box(x):
            return []
        properties = metadata.TensorProperties.create_from_tensor(x.local.detach())
        [chunk] = _chunks(x)
        data = planner.TensorWriteData(chunk, properties, x.spec.shape)
        index = metadata.MetadataIndex(fqn, chunk.offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        """What to read, straight into the local."""
        return [] if prepare_to_read(self) is None else _chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The piece of this rank, to be written or read into."""
        x: MeshTensor = self if self._settled is None else self._settled
        return x.local.detach()


def _chunks(x: MeshTensor) -> list[Any]:
    metadata: Any = import_module("torch.distributed.checkpoint.metadata")
    return [metadata.ChunkStorageMetadata(*map(torch.Size, x.spec.local_box))]
