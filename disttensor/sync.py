"""Gradients that are still a sum of contributions are reduced before an optimizer reads them: one flat collective for
all that wait on the same axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _foreach_supported_types as clip_types

from disttensor import comm
from disttensor.gradient import settled
from disttensor.tensor import DistTensor

Tensor = torch.Tensor


def sync_gradients(params: Any) -> None:
    """Reduce the pending gradients of ``params`` (a module, or tensors). Nothing is sent where nothing is pending.

    >>> w = dt.ones(4, mesh=mesh, requires_grad=True)
    >>> (w * 2).sum().backward()
    >>> dt.sync_gradients([w])
    >>> w.grad.tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    tensors: Iterable[Any] = params.parameters() if isinstance(params, torch.nn.Module) else params
    buckets: dict[Any, list[tuple[DistTensor, DistTensor]]] = {}
    for p in tensors:
        if type(p) is not DistTensor:
            continue
        grad: Any = p.grad
        if grad is not None and grad._spec.layout.partial:
            axes = tuple(a for a, _ in grad._spec.layout.partial)
            key = (grad._spec.mesh, axes, grad._spec.dtype)
            buckets.setdefault(key, []).append((p, grad))
    for (mesh, axes, _), members in buckets.items():
        _reduce(mesh, axes, members)


def _reduce(mesh: Any, axes: tuple[int, ...], members: list[tuple[DistTensor, DistTensor]]) -> None:
    """One all-reduce of all members' gradients over ``axes``."""
    busy = tuple(a for a in axes if mesh.shape[a] > 1)
    with torch.no_grad():
        pieces = [g._local.detach() for _, g in members]
        if busy:
            flat = torch.cat([t.reshape(-1) for t in pieces])
            flat = comm.all_reduce(flat, "sum", mesh.group(busy))
            pieces = [
                part.view(t.shape)
                for part, t in zip(flat.split([t.numel() for t in pieces]), pieces, strict=True)
            ]
    for (p, g), total in zip(members, pieces, strict=True):
        settled(p, g, total)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Runs before every optimizer step; a closure is followed by its own reduction."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sync_gradients(params)

    def then_sync(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            sync_gradients(params)
            return loss

        return run

    if len(args) > 1 and callable(args[1]):
        return (args[0], then_sync(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": then_sync(kwargs["closure"])}
    return None


register_optimizer_step_pre_hook(_before_step)

# torch chooses its functions on lists for the types that it lists here (as DTensor enters itself).
for _types in (optimizer_types, clip_types):
    if DistTensor not in _types:
        _types.append(DistTensor)
