"""Views: dims are split, merged, renamed, added or dropped; nothing is computed."""

from __future__ import annotations

from ops.factors import Arg, Factors
from ops.registry import rule

import torch


@rule(torch.transpose, torch.swapaxes, torch.swapdims)
def transpose(input: Arg, dim0: int, dim1: int) -> Factors:
    """the two dims change places"""
    dims = list(range(input.ndim))
    if input.ndim:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return Factors((tuple(range(input.ndim)),), (tuple(dims),), dict(enumerate(input.shape)), moves=True, view=True)
