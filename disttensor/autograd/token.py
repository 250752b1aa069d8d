"""Ghosts: what stands for the local on a rank outside the mesh.

A ghost is a tensor of zero size that is in the local autograd graph like any local, so that
``requires_grad``, ``is_leaf`` and ``backward`` need no second mechanism. There are four kinds:

    blank    shared by all tensors that need no gradient
    leaf     of a parameter or another leaf that requires grad: one of its own
    bare     shared by all results that require grad but depend on nothing that this rank has computed
    token    came from a transfer between meshes (``disttensor.tensor.cross_mesh``): a backward that reaches it receives the gradient
             of what this rank has sent. Results carry on the token of their arguments, joined where
             there are several

So the graph of ghosts says what depends on what across all stages, and autograd, which runs nodes
in the reverse order of their making, runs the transfers of the backward in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

Tensor = torch.Tensor
_used: list[torch.device] = []
replaced = [0]  # how often a tensor outside got another token or spec than the one it was made with


@lru_cache(maxsize=64)
def blank(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def bare(device: torch.device) -> Tensor:
    with torch.enable_grad():
        root = torch.empty(0, device=device, requires_grad=True)
        return root.view_as(root)


@lru_cache(maxsize=64)
def anchor(device: torch.device) -> Tensor:
    """A leaf that every transfer takes: a backward that asks for it as an input runs all transfers
    that it reaches, on all ranks alike, whatever else it asks for on this one."""
    _used.append(device)
    return torch.empty(0, device=device, requires_grad=True)


def anchors() -> list[Tensor]:
    """The anchors of the transfers so far."""
    return [anchor(device) for device in _used]


def leaf(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


def joined(ghosts: Iterable[Tensor], device: torch.device) -> Tensor:
    """The ghost of a result that depends on these. Costs nothing where one token is among them, or
    none."""
    nothing = bare(device)
    token: Tensor | None = None
    needed = False
    for g in ghosts:
        if not g.requires_grad:
            continue
        needed = True
        if g is token or g is nothing or g.grad_fn is None:
            continue
        token = g if token is None else torch.cat((token, g))
    if not needed or not torch.is_grad_enabled():
        return blank(device)
    return nothing if token is None else token
