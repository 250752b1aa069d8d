"""Dtypes of computations: half precision is computed in float32, autocast casts arguments, and
roots have a gradient at 0."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)


SUMMED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def smooth(dtype: Any) -> bool:
    """Returns True for a dtype of real or complex numbers of at least 16 bits."""
    return dtype is None or ((dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1)


def has_sums(dtype: Any) -> bool:
    """Returns True if tensors of this dtype can be added up over ranks: not of bools, of unsigned
    integers of more than 8 bits, nor of floats of 8 bits."""
    return dtype is None or dtype in SUMMED


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which torch accumulates: float32 for half precision."""
    return torch.float32 if dtype in HALVES else dtype


def widened(x: Tensor) -> Tensor:
    """Returns a half-precision tensor as float32, the dtype in which torch accumulates."""
    return x.to(wide(x.dtype))


def autocast(x: Tensor | None) -> Any:
    """Casts an argument of a product or of attention as autocast does."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    low = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if low else x


def root(x: Tensor, order: float = 2) -> Tensor:
    """Returns x to the power of 1/order, with the gradient 0 at 0, as in torch's std and norms."""
    if order == 1:
        return x
    at_zero = x == 0
    x = x.masked_fill(at_zero, 1)
    return (x.sqrt() if order == 2 else x.pow(1 / order)).masked_fill(at_zero, 0)
