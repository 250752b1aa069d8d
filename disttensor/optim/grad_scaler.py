"""GradScaler across meshes: all ranks of the world decide together if a gradient is infinite.

This replaces the check of ``torch.amp.GradScaler`` for optimizers with DistTensors among their
parameters, or of a scaler given to ``shard_scaler``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from disttensor.comm import collectives, objects
from disttensor.comm.groups import world_group
from disttensor.gradients.sync import sync_gradients
from disttensor.optim.clip_grad import by_mesh, group_of_norm
from disttensor.optim.step_hooks import check_fresh
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.uses import invalidate

Tensor = torch.Tensor


def shard_scaler(scaler: GradScaler) -> GradScaler:
    """Makes all ranks of the world skip the same steps of ``scaler``, and returns the scaler.

    Every rank of the world makes this call. After it, every rank has to call ``unscale_`` and
    ``step`` for the same number of optimizers in the same order. This includes optimizers that on
    this rank have only parameters of other stages, regular tensors, or no parameters. Without this
    call, only optimizers with DistTensors on every rank are synchronized. Each call costs one
    all-reduce of a number; pending gradients are reduced first. The scale is the same on all ranks.
    Raises TypeError for anything but a GradScaler, ValueError if the settings of ranks differ.

    >>> scaler = dt.optim.shard_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> sgd = torch.optim.SGD([w], lr=1.0)
    >>> scaler.scale((w * float("inf")).sum()).backward()
    >>> scaler.step(sgd), scaler.update()
    (None, None)
    >>> w.tolist(), scaler.get_scale()
    ([1.0, 1.0, 1.0], 2.0)
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"shard_scaler: a torch.amp.GradScaler is expected, not {type(scaler).__name__}"
        )
    mine = {"enabled": scaler.is_enabled(), **scaler.state_dict()}
    everyone = objects.gather_objects(mine, world_group())
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                f"shard_scaler: rank 0 has a scaler of {everyone[0]}, rank {rank} one of {other}: "
                "gradients would be scaled differently. Make it with the same arguments on all "
                "ranks, or load the same state"
            )
    scaler._whole_world = True  # type: ignore[attr-defined]
    return scaler


Unscale = Callable[..., dict[torch.device, Tensor]]


def wrap_unscale_grads(original: Unscale) -> Unscale:
    """Replaces ``GradScaler._unscale_grads_``, by which all methods read gradients."""

    @wraps(original)
    def _unscale_grads_(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Returns device -> 1.0 if any rank of any mesh has an infinite gradient, else 0.0. Every
        rank of the world calls this, also ranks without a gradient."""
        listed = (p for group in optimizer.param_groups for p in group["params"])
        params = list({id(p): p for p in listed}.values())
        check_fresh(params, f"GradScaler with {type(optimizer).__name__}")
        ours = any(isinstance(p, DistTensor) for p in params)
        whole = getattr(self, "_whole_world", False)
        if not ours and not whole:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        sync_gradients(params)  # a sum may be infinite although its summands are finite
        found, refused = found_inf.clone(), None
        pieces = SimpleNamespace(param_groups=[{"params": [_piece_of(p) for p in params]}])
        try:
            for there in original(self, pieces, inv_scale, found_inf, allow_fp16).values():
                found = torch.maximum(found, there.to(found.device))
        except ValueError as error:  # other ranks may raise no error, and wait for this rank
            refused = error
            found.fill_(1.0)
        group = world_group() if whole else group_of_norm(by_mesh(params))
        if group is not None:
            found = collectives.all_reduce(found, "max", group)
        if refused is not None:
            raise refused
        return {found.device: found}

    return _unscale_grads_


def _piece_of(p: Tensor) -> Tensor:
    """Returns a tensor whose gradient is this rank's piece of the gradient of ``p``."""
    grad: Any = p.grad
    if grad is None or not isinstance(p, DistTensor):
        return p
    invalidate(grad)
    piece: Tensor = grad.local.detach()
    piece.grad = grad.local
    return piece
