"""DistTensor in torch.distributed.checkpoint: the pieces that this rank writes and reads.

DTensor uses the same protocol, so the files are the same and any mesh can read them. Ranks that
hold the same piece all offer it; torch's planner selects one of them to write it and balances the
load. A rank off the mesh writes and reads nothing.
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
from disttensor.tensor.uses import invalidate

Tensor = torch.Tensor


def spec_of_boxes(spec: DistSpec) -> DistSpec:
    """Returns a spec whose locals are boxes of the value: ``spec`` if they are, else ``spec``
    without pending reductions and without the axes of a user's own placements."""
    layout = spec.layout
    if not layout.partial and not layout.custom:
        return spec
    own = {axis for axis, _ in layout.custom}
    return spec.with_layout(
        Layout(tuple(tuple(a for a in axes if a not in own) for axes in layout.dims))
    )


def has_box(x: MeshTensor) -> bool:
    """Returns True if this rank holds part of the value. Every rank of the mesh holds part of a
    value without elements."""
    return x.is_initialized and (0 not in x.local.shape or 0 in x.spec.shape)


def prepare_to_read(x: MeshTensor) -> Box | None:
    """Returns the box of a file to read directly into the local, or None. All ranks of the mesh
    count this as a write, also with an empty piece. Raises RuntimeError if a write to the local
    would not change the value."""
    spec, state = x.spec, x._view_state
    if spec_of_boxes(spec) is not spec or (state is not None and state.func is not None):
        raise RuntimeError(
            f"a checkpoint cannot be read into {spec!r}: its local is no piece of the value's own "
            "memory (it is pending, placed by a type of yours, or a copy in the place of a view). "
            f"Read into a tensor of {spec_of_boxes(spec)!r}, and reshard that"
        )
    if x.is_initialized and not x.local.is_inference():
        torch.autograd.graph.increment_version(x.local)
    invalidate(x)
    return spec.local_box if has_box(x) else None


class Checkpointable(MeshTensor):
    _reduced_copy: Any = None  # the reduced value, written for a value that is still pending

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Returns the items to write. A pending value is reduced: all ranks of the mesh call it."""
        planner: Any = import_module("torch.distributed.checkpoint.planner")
        metadata: Any = import_module("torch.distributed.checkpoint.metadata")
        if self._view_state is not None:
            views.check(self)
        x: MeshTensor = self
        dst = spec_of_boxes(self.spec)
        if dst is not self.spec:
            with torch.no_grad():
                x = self._reduced_copy = resharded(self, dst)
        if not has_box(x):
            return []
        properties = metadata.TensorProperties.create_from_tensor(x.local.detach())
        [chunk] = _chunks(x)
        data = planner.TensorWriteData(chunk, properties, x.spec.shape)
        index = metadata.MetadataIndex(fqn, chunk.offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        """Returns the boxes to read directly into the local."""
        return [] if prepare_to_read(self) is None else _chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Returns the piece of this rank, to be written or read into."""
        x: MeshTensor = self if self._reduced_copy is None else self._reduced_copy
        return x.local.detach()


def _chunks(x: MeshTensor) -> list[Any]:
    metadata: Any = import_module("torch.distributed.checkpoint.metadata")
    return [metadata.ChunkStorageMetadata(*map(torch.Size, x.spec.local_box))]
