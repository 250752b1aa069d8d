"""Tokens: they stand for the local on a rank off the mesh.

"Token" is JAX's word for a value that only orders effects. A token is a tensor of zero size, in the
local autograd graph like any local, so that ``requires_grad``, ``is_leaf`` and ``backward`` need no
second mechanism. Shared tokens are made outside the caller's modes. There are four kinds:

    no_grad    shared by all tensors that need no gradient
    leaf       of a parameter or another leaf that requires grad; never shared
    no_source  shared by all results that require grad but depend on no tensor that this rank sent
    transfer   made by a transfer between meshes (``disttensor.tensor.reshard``): a backward that
               reaches it receives the gradient of the tensor that this rank sent. A result has the
               transfer token of its arguments; several are joined

So the graph of tokens holds the dependencies across all stages. Autograd runs nodes in the reverse
order of their creation, so it runs the transfers of the backward in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from disttensor.torch_private import no_dispatch, outside_modes, renumber

Tensor = torch.Tensor
_LAST = (1 << 63) - 1  # number of a node: above all that autograd gives
_used: list[torch.device] = []
# Counts changes of tensors that guards do not see: a new token, local, spec or flag, or a tensor
# that modules show in place of their own.
replacements = [0]


@lru_cache(maxsize=64)
def no_grad_token(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    with outside_modes():
        return torch.empty(0, dtype=dtype, device=device)


def leaf(device: torch.device, dtype: torch.dtype) -> Tensor:
    with no_dispatch():
        return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


@lru_cache(maxsize=64)
def no_source_token(device: torch.device) -> Tensor:
    with outside_modes(), torch.enable_grad():
        root = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        shared = root.view_as(root)
    # It outlives the forward that runs now: its number must not be one of that forward's nodes.
    renumber(shared.grad_fn, _LAST)
    return shared


def join(tokens: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the token of a result that depends on these. Costs nothing if at most one is a
    transfer token."""
    shared = no_source_token(device)
    transfer: Tensor | None = None
    needed = False
    for t in tokens:
        if not t.requires_grad:
            continue
        needed = True
        if t is not transfer and t is not shared and t.grad_fn is not None:
            transfer = t if transfer is None else torch.cat((transfer, t))
    if not needed or not torch.is_grad_enabled():
        return no_grad_token(device)
    return shared if transfer is None else transfer


@lru_cache(maxsize=64)
def anchor(device: torch.device) -> Tensor:
    """Returns a leaf that every transfer takes. A backward with it as an input runs all transfers
    that it reaches, on all ranks alike, whatever its other inputs on this rank."""
    _used.append(device)
    with outside_modes():
        return torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)


def anchors() -> list[Tensor]:
    """Returns the anchors of the transfers so far."""
    return [anchor(device) for device in _used]
