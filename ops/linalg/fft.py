"""Fourier transforms: linear; the dims that are transformed stay whole, all others pass through."""

from __future__ import annotations

from typing import Any

import torch

from ops.batching import or_zero, results_of
from ops.dims import ONE, fronts, moved
from ops.factors import Arg, Factors
from ops.registry import Function, Rule, register

fft = torch.fft


def _transform(func: Function, default: Any) -> None:
    """``default``: the dims where none are given; None: the last ones for which there are sizes, or
    all."""

    def factors(
        input: Arg, n: Any = None, dim: Any = default, norm: Any = None, s: Any = None, out: None = None
    ) -> Factors:  # fmt: skip
        given = n if n is not None else s
        if dim is None:
            dim = tuple(range(-len(given), 0)) if given is not None else tuple(range(input.ndim))
        gone = fronts(dim, input.ndim)
        (shape,) = results_of(func, (input, given, dim, norm), {})
        dims = tuple(None if i in gone else i for i in range(input.ndim))
        sizes: dict[Any, int] = {i: s for i, s in enumerate(input.shape) if i not in gone}
        return Factors((dims,), (dims,), sizes, terms=ONE, shapes=(shape,), local=or_zero)

    rule = Rule(func.__name__, factors, False, "value", False, "linear; transformed dims whole")
    register(rule, func, exact=True)


for _names, _default in (
    ("fft ifft rfft irfft hfft ihfft", -1),
    ("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (-2, -1)),
    ("fftn ifftn rfftn irfftn hfftn ihfftn", None),
):
    for _name in _names.split():
        _transform(getattr(fft, _name), _default)


def shift(input: Arg, dim: Any = None) -> Factors:
    """movement; the dims that are shifted stay whole"""
    gone = fronts(range(input.ndim) if dim is None else dim, input.ndim)
    dims = tuple(range(input.ndim))
    return moved(input, dims, whole=frozenset(gone))


register(
    Rule("fftshift", shift, pattern=shift.__doc__ or ""), fft.fftshift, fft.ifftshift, exact=True
)
