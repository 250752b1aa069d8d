"""Tokens: what stands for the local on a rank outside the mesh.

JAX's word for a value that only orders effects. A token is a tensor of zero size, in the local
autograd graph like any local, so that ``requires_grad``, ``is_leaf`` and ``backward`` need no
second mechanism. Shared tokens are made outside the caller's modes. There are four kinds:

    detached   shared by all tensors that need no gradient
    leaf       of a parameter or another leaf that requires grad: one of its own
    orphan     shared by all results that require grad but depend on nothing that this rank has sent
    transfer   made by a transfer between meshes (``disttensor.tensor.reshard``): a backward that
               reaches it receives the gradient of what this rank has sent. Results carry on the
               transfer token of their arguments; several are joined

So the graph of tokens says what depends on what across all stages, and autograd, which runs nodes
in the reverse order of their making, runs the transfers of the backward in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from disttensor.torch_private import no_dispatch, outside_modes

Tensor = torch.Tensor
_used: list[torch.device] = []
# how often a tensor was changed past its guards: it got another token, local, spec or flag than it
# was made with, or modules were given tensors to show in place of theirs
replaced = [0]


@lru_cache(maxsize=64)
def detached(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    with outside_modes():
        return torch.empty(0, dtype=dtype, device=device)


def leaf(device: torch.device, dtype: torch.dtype) -> Tensor:
    with no_dispatch():
        return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


@lru_cache(maxsize=64)
def orphan(device: torch.device) -> Tensor:
    with outside_modes(), torch.enable_grad():
        root = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        return root.view_as(root)


def join(tokens: Iterable[Tensor], device: torch.device) -> Tensor:
    """The token of a result that depends on these. Costs nothing where at most one is of a
    transfer."""
    shared = orphan(device)
    transfer: Tensor | None = None
    needed = False
    for t in tokens:
        if not t.requires_grad:
            continue
        needed = True
        if t is not transfer and t is not shared and t.grad_fn is not None:
            transfer = t if transfer is None else torch.cat((transfer, t))
    if not needed or not torch.is_grad_enabled():
        return detached(device)
    return shared if transfer is None else transfer


@lru_cache(maxsize=64)
def anchor(device: torch.device) -> Tensor:
    """A leaf that every transfer takes: a backward that asks for it as an input runs all transfers
    that it reaches, on all ranks alike, whatever else it asks for on this one."""
    _used.append(device)
    with outside_modes():
        return torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)


def anchors() -> list[Tensor]:
    """The anchors of the transfers so far."""
    return [anchor(device) for device in _used]
