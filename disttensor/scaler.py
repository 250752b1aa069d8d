"""GradScaler across meshes: whether a gradient is infinite is one decision of the whole world.

``torch.amp.GradScaler`` stays as it is; the look at the gradients of one optimizer, which all its methods share, is done
here when DistTensors are among its parameters.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from disttensor.clip import by_mesh, everywhere, over_world
from disttensor.sync import sync_gradients
from disttensor.tensor import DistTensor

Tensor = torch.Tensor
_unscale: Any = GradScaler._unscale_grads_


class _Share:
    """The parameters of one mesh, as the part of an optimizer that the scaler looks at."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


@wraps(_unscale)
def _unscale_grads_(
    self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """device -> 1.0 where any rank of any mesh has found an infinite gradient, else 0.0. Every rank of the world calls
    this, those without a gradient too."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DistTensor) for p in params):
        return _unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    sync_gradients(params)  # a sum may be infinite where no share of it is
    shares = by_mesh(params)
    found = found_inf.clone()
    for share in shares.values():
        for there in _unscale(self, _Share(share), inv_scale, found_inf, allow_fp16).values():
            found = torch.maximum(found, there.to(found.device))
    meshes = [mesh for mesh in shares if mesh is not None]
    if not everywhere(meshes) or None in shares:
        found = over_world(found, "max")
    return {found.device: found}


GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]
