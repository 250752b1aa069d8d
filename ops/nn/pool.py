"""Pooling: batch and channels pass through, the dims that the window slides over stay whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import FIRST, tuple_of
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.registry import rule


def _pooled(size: int, k: int, s: int, p: int, d: int, up: bool) -> int:
    """How many windows fit; with ``up`` one more that begins inside the input or its left
    padding."""
    room = size + 2 * p - d * (k - 1) - 1
    out = -(-room // s) + 1 if up else room // s + 1
    return out - 1 if up and (out - 1) * s >= size + p else out


def _windows(
    n: int, input: Arg, kernel: Any, stride: Any, padding: Any, dilation: Any, up: bool
) -> tuple[int, ...]:
    """The sizes of the result in the dims that the window slides over. No stride: that of the
    kernel."""
    options = [tuple_of(v, n) for v in (kernel, stride or kernel, padding, dilation)]
    return tuple(
        _pooled(size, k, s, p, d, up)
        for size, k, s, p, d in zip(input.shape[-n:], *options, strict=True)
    )


def _factors(
    name: str, n: int, input: Arg, out: tuple[int, ...], results: int, linear: bool
) -> Factors:
    if input.ndim not in (n + 1, n + 2) or min(out) < 1:
        raise NoRule(f"{name} of {list(input.shape)}")
    lead = tuple(range(input.ndim - n))
    slide = tuple(f"in{i}" for i in range(n))
    made = tuple(f"out{i}" for i in range(n))
    sizes: dict[Any, int] = dict(zip((*lead, *slide), input.shape, strict=True))
    sizes.update(zip(made, out, strict=True))

    return Factors(
        ((*lead, *slide),), ((*lead, *made),) * results, sizes, whole=frozenset(slide),
        terms=FIRST if linear else (), local=zeros_if_empty,
    )  # fmt: skip


def _max_pool(n: int, *funcs: Any, always: bool = False) -> None:
    name = funcs[0].__name__

    def factors(
        input: Arg, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Factors:  # fmt: skip
        out = _windows(n, input, kernel_size, stride, padding, dilation, ceil_mode)
        return _factors(name, n, input, out, 2 if always or return_indices else 1, False)

    factors.__name__, factors.__doc__ = name, "the dims that the window slides over stay whole"
    rule(*funcs, exact=True)(factors)


def _avg_pool(n: int, func: Any) -> None:
    name = func.__name__

    def factors(
        input: Arg, kernel_size: Any, stride: Any = None, padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Factors:  # fmt: skip
        out = _windows(n, input, kernel_size, stride, padding, 1, ceil_mode)
        return _factors(name, n, input, out, 1, True)

    factors.__name__, factors.__doc__ = name, "linear; what the window slides over stays whole"
    rule(func, exact=True)(factors)


def _adaptive(n: int, *funcs: Any, linear: bool, always: bool = False) -> None:
    name = funcs[0].__name__

    def factors(input: Arg, output_size: Any, return_indices: bool = False) -> Factors:
        wanted = (output_size,) * n if output_size is None else tuple_of(output_size, n)
        out = tuple(
            w if w is not None else s for w, s in zip(wanted, input.shape[-n:], strict=True)
        )
        return _factors(name, n, input, out, 2 if always or return_indices else 1, linear)

    factors.__name__, factors.__doc__ = name, "the dims that are pooled stay whole"
    rule(*funcs, exact=True)(factors)


_max_pool(1, F.max_pool1d, torch.max_pool1d)
_max_pool(2, F.max_pool2d, torch.max_pool2d)
_max_pool(3, F.max_pool3d, torch.max_pool3d)
_max_pool(1, F.max_pool1d_with_indices, always=True)
_max_pool(2, F.max_pool2d_with_indices, always=True)
_max_pool(3, F.max_pool3d_with_indices, always=True)
_avg_pool(1, F.avg_pool1d)
_avg_pool(2, F.avg_pool2d)
_avg_pool(3, F.avg_pool3d)
_adaptive(1, F.adaptive_avg_pool1d, linear=True)
_adaptive(2, F.adaptive_avg_pool2d, linear=True)
_adaptive(3, F.adaptive_avg_pool3d, linear=True)
_adaptive(1, F.adaptive_max_pool1d, linear=False)
_adaptive(2, F.adaptive_max_pool2d, linear=False)
_adaptive(3, F.adaptive_max_pool3d, linear=False)
_adaptive(
    1, F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d, linear=False, always=True
)
_adaptive(2, F.adaptive_max_pool2d_with_indices, linear=False, always=True)
_adaptive(3, F.adaptive_max_pool3d_with_indices, linear=False, always=True)
