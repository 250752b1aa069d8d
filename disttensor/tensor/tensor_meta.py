"""A DistTensor without its mesh and its data: what other ranks are told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from disttensor.core.layout import Layout
from disttensor.tensor.dist_tensor import DistTensor


class TensorMeta(NamedTuple):
    """All that a rank outside the mesh needs to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    requires_grad: bool


def described(value: Any) -> Any:
    """A result with a TensorMeta in place of each DistTensor."""
    if isinstance(value, DistTensor):
        spec = value.spec
        return TensorMeta(tuple(spec.shape), spec.dtype, spec.layout, value.requires_grad)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [described(v) for v in value]
        return items if type(value) is list else tuple(items)
    return value
