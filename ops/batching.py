"""Functions of the last dims that treat each index of the leading dims separately: the leading dims
may be split, the last dims are whole.

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
    """Returns the shapes of the results. Raises NoRule if the function cannot run on tensors
    without data, or raises an error."""

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
    """Returns the factors of a function whose leading dims broadcast, and lead every result.
    ``cores[i]``: the number of last dims of tensor i, which are whole."""
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
    """Returns the factors of ``func`` with these letters; a dim with None is whole. All results
    have the letters ``out``."""
    sizes: dict[Letter, int] = {}
    for t, dims in zip(tensors_in(*args, *kwargs.values()), ins, strict=True):
        sizes.update({d: s for d, s in zip(dims, t.shape, strict=True) if d is not None})
    shapes = results_of(func, args, kwargs)
    options.setdefault("local", zeros_if_empty)
    return Factors(tuple(ins), (out,) * len(shapes), sizes, shapes=tuple(shapes), **options)
