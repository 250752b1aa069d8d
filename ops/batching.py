"""Functions of the last dims, one for each index of the dims before: these are split, the last dims
stay whole.

Shapes of results come from the function itself, run on tensors without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from disttensor.pytree import substitute
from ops.dims import tensors_in
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Dims, Factors, Letter, pointwise_factors
from ops.infer import NoRule
from ops.registry import Function


def results_of(func: Function, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes of the results. Raises NoRule where the function does not say, or refuses the
    arguments."""

    def meta(value: Arg) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype or torch.float32, device="meta")

    try:
        args, kwargs = substitute((args, kwargs), meta, Arg)
        out = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise NoRule(f"{getattr(func, '__name__', func)}: {error}") from None
    found = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
    return [tuple(t.shape) for t in found]


def batched_factors(
    func: Function, args: Any, kwargs: Any, tensors: list[Arg], cores: list[int], **options: Any
) -> Factors:
    """``cores[i]``: how many last dims of tensor i stay whole. Those before broadcast, and lead
    every result."""
    leads = [t.shape[: t.ndim - core] for t, core in zip(tensors, cores, strict=True)]
    if any(t.ndim < core for t, core in zip(tensors, cores, strict=True)):
        raise NoRule(f"too few dims for {getattr(func, '__name__', func)}")
    f = pointwise_factors([Arg(lead) for lead in leads])
    n = len(f.outputs[0])
    inputs = ((*dims, *[None] * core) for dims, core in zip(f.inputs, cores, strict=True))
    shapes = results_of(func, args, kwargs)
    if any(shape[:n] != tuple(f.sizes.values()) for shape in shapes):
        raise NoRule("a result without the leading dims")
    outputs = tuple((*range(n), *[None] * (len(shape) - n)) for shape in shapes)
    return Factors(tuple(inputs), outputs, f.sizes, shapes=tuple(shapes), **options)


def shaped(
    func: Function, args: Any, kwargs: Any, ins: Sequence[Dims], out: Dims, **options: Any
) -> Factors:
    """Factors of ``func`` with these letters, None for what stays whole; all results have the
    letters ``out``."""
    sizes: dict[Letter, int] = {}
    for t, dims in zip(tensors_in(*args, *kwargs.values()), ins, strict=True):
        sizes.update({d: s for d, s in zip(dims, t.shape, strict=True) if d is not None})
    shapes = results_of(func, args, kwargs)
    options.setdefault("local", zeros_if_empty)
    return Factors(tuple(ins), (out,) * len(shapes), sizes, shapes=tuple(shapes), **options)
