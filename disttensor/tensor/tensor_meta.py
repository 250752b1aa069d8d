"""Metadata of a DistTensor without its mesh and its data, to be sent to other ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from disttensor.core.layout import Layout
from disttensor.tensor.dist_tensor import DistTensor


class TensorMeta(NamedTuple):
    """All metadata of a tensor that a rank off the mesh needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    requires_grad: bool


def describe_tensors(value: Any) -> Any:
    """Replaces each DistTensor in a result by its TensorMeta."""
    if isinstance(value, DistTensor):
        spec = value.spec
        return TensorMeta(tuple(spec.shape), spec.dtype, spec.layout, value.requires_grad)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [describe_tensors(v) for v in value]
        return items if type(value) is list else tuple(items)
    return value
