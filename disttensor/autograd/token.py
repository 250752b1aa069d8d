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

import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

Tensor = torch.Tensor
_used: list[torch.device] = []
remade = [0]  # how often a tensor outside got another ghost or spec than the one it was made with


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


def share(view: Any, base: Any) -> None:
    """``view`` shares the memory of ``base`` on the ranks inside: what is written to one is written
    to both."""
    while base._viewed is not None:
        base = base._viewed
    view._viewed = base
    local = base.local
    if local.requires_grad and local.is_leaf:
        return  # it cannot be written to
    views = base._views
    if views is None:
        base._views = [weakref.ref(view)]
        return
    if len(views) > 31:
        views[:] = [v for v in views if v() is not None]
    views.append(weakref.ref(view))


def family(x: Any) -> list[Any]:
    """All that share the memory of x, x among them."""
    base = x if x._viewed is None else x._viewed
    return [base, *(v for v in (ref() for ref in base._views or ()) if v is not None), x]


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
