"""Functions of the last dims, one for each index of the dims before: these are split, the last dims
stay whole.

Shapes of results come from the function itself, run on tensors without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.dims import tensors_in
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Dims, Factors, Letter
from ops.infer import NoRule
from ops.registry import Function


def results_of(func: Function, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes of the results. Raises NoRule where the function does not say, or refuses the
    arguments."""

    def meta(value: Any) -> Any:
        if isinstance(value, Arg):
            return torch.empty(value.shape, dtype=value.dtype or torch.float32, device="meta")
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    try:
        out = func(*[meta(a) for a in args], **{k: meta(v) for k, v in kwargs.items()})
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
    n = max(map(len, leads))
    sizes: dict[Any, int] = {}
    inputs = []
    for t, lead in zip(tensors, leads, strict=True):
        letters: list[Any] = []
        for i, s in enumerate(lead, n - len(lead)):
            if s != 1 and sizes.setdefault(i, s) != s:
                raise NoRule("leading dims that do not broadcast")
            letters.append(None if s == 1 else i)
        inputs.append((*letters, *[None] * (t.ndim - len(lead))))
    shapes = results_of(func, args, kwargs)
    outputs = []
    for shape in shapes:
        if shape[:n] != tuple(sizes.get(i, 1) for i in range(n)):
            raise NoRule("a result without the leading dims")
        outputs.append((*[i if i in sizes else None for i in range(n)], *[None] * (len(shape) - n)))
    return Factors(tuple(inputs), tuple(outputs), sizes, shapes=tuple(shapes), **options)


def shaped(
    func: Function, args: Any, kwargs: Any, ins: Sequence[Dims], out: Dims, **options: Any
) -> Factors:
    """Factors of ``func`` with these letters, None for what stays whole; all results have the
    letters ``out``."""
    tensors: list[Arg] = []
    for value in (*args, *kwargs.values()):
        tensors += tensors_in(*value) if isinstance(value, (list, tuple)) else tensors_in(value)
    sizes: dict[Letter, int] = {}
    for t, dims in zip(tensors, ins, strict=True):
        sizes.update({d: s for d, s in zip(dims, t.shape, strict=True) if d is not None})
    shapes = results_of(func, args, kwargs)
    options.setdefault("local", zeros_if_empty)
    return Factors(tuple(ins), (out,) * len(shapes), sizes, shapes=tuple(shapes), **options)
