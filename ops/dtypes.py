"""Numbers: half precision is computed in float32; roots have a gradient at 0."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which torch accumulates: float32 for half precision."""
    return torch.float32 if dtype in HALVES else dtype


def widened(x: Tensor) -> Tensor:
    """Half precision as float32, in which torch accumulates too."""
    return x.to(wide(x.dtype))


def root(x: Tensor, order: float = 2) -> Tensor:
    """x to the power of 1/order, with the gradient 0 at 0, as torch's std and norms have it."""
    at_zero = x == 0
    x = x.masked_fill(at_zero, 1)
    return (x.sqrt() if order == 2 else x.pow(1 / order)).masked_fill(at_zero, 0)
