"""Metadata of the global tensor, read from the spec: no communication, the same on every rank."""

# mypy: disable-error-code="override"

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from disttensor.core.layout import dims_mapping_of, global_strides, is_dense
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement
from disttensor.tensor.base import MeshTensor


def _named(name: str) -> Any:
    """Returns a property that raises AttributeError, for a name that other libraries have."""

    def get(x: Any) -> Any:
        raise AttributeError(
            f"'DistTensor' object has no attribute {name!r}: its mesh is x.process_mesh, and as "
            "torch's DeviceMesh x.process_mesh.to_device_mesh()"
        )

    return property(get)


class Metadata(MeshTensor):
    """Layout, shape, dtype and strides."""

    mesh = _named("mesh")

    @property
    def process_mesh(self) -> ProcessMesh:
        """The mesh on which the pieces lie."""
        return self.spec.mesh

    @property
    def device_mesh(self) -> ProcessMesh:
        """The mesh, by the name that it has on torch's DTensor."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self.spec.placements

    @property
    def dims_mapping(self) -> list[int | list[int]]:
        """Lists for each dim -1, the mesh axis that splits it, or a list of axes (major first)."""
        return dims_mapping_of(self.spec.layout)

    @property
    def partial_status(self) -> dict[int, str]:
        """Maps each mesh axis with a pending reduction to the reduction."""
        return dict(self.spec.layout.partial)

    @property
    def shape(self) -> torch.Size:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def itemsize(self) -> int:
        return self.spec.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    def size(self, dim: int | None = None) -> Any:
        return self.spec.shape if dim is None else self.spec.shape[dim]

    def dim(self) -> int:
        return len(self.spec.shape)

    ndimension = dim

    def numel(self) -> int:
        return self.spec.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.spec.shape[0]

    def element_size(self) -> int:
        return self.spec.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.spec.dtype.is_complex

    def stride(self, dim: int | None = None) -> Any:
        """Returns the strides of the global tensor, with the order of dims of the local (0 where it
        repeats)."""
        if self.is_initialized:
            strides = global_strides(self.local.stride(), self.spec.local_shape, self.spec.shape)
        else:
            state, shape = self._view_state, self.spec.shape
            own = None if state is None else state.strides
            strides = torch.empty(shape, device="meta").stride()
            strides = strides if own is None else global_strides(own, shape, shape)
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        if not self.is_initialized:
            state = self._view_state
            own = self.stride() if state is None or state.strides is None else state.strides
            empty = torch.empty_strided(self.spec.shape, own, device="meta")
            return empty.is_contiguous(memory_format=memory_format)
        here, spec = self.local.is_contiguous(memory_format=memory_format), self.spec
        thin = min(spec.local_shape, default=2) <= 1 and spec.local_shape != spec.shape
        if here and thin and memory_format is torch.contiguous_format:
            return is_dense(self.local, spec.shape)
        return here

    def storage_offset(self) -> int:
        return 0


# Storage and device: read from the local, without a dispatch for each read.
for _name in (
    "_backward_hooks", "_base", "_post_accumulate_grad_hooks", "_version", "is_cpu", "is_cuda",
    "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "names", "output_nr", "volatile",
):  # fmt: skip
    setattr(Metadata, _name, property(attrgetter(f"local.{_name}")))
