"""Fourier transforms: linear; the dims that are transformed stay whole, all others pass through."""

from __future__ import annotations

from typing import Any

import torch

from ops.dims import FIRST, fronts, results_of, shaped, tensors_in, without
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors, NoRule
from ops.registry import Function, rule

fft = torch.fft


def _transform(func: Function, default: Any) -> None:
    """Registers a transform. ``default``: the dims if none are given; None: the last ones for which
    there are sizes, or all."""

    @rule(func, exact=True, doc="linear; transformed dims whole")
    def factors(
        input: Arg, n: Any = None, dim: Any = default, norm: Any = None, s: Any = None,
        out: None = None,
    ) -> Factors:  # fmt: skip
        given = n if n is not None else s
        if dim is None:
            dim = tuple(range(-len(given), 0)) if given is not None else tuple(range(input.ndim))
        dims = without(input, fronts(dim, input.ndim))
        return shaped(func, (input, given, dim, norm), {}, [dims], dims, linear_terms=FIRST)


for _names, _default in (
    ("fft ifft rfft irfft hfft ihfft", -1),
    ("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (-2, -1)),
    ("fftn ifftn rfftn irfftn hfftn ihfftn", None),
):
    for _name in _names.split():
        _transform(getattr(fft, _name), _default)


@rule(torch.stft, exact=True)
def stft(input: Arg, *args: Any, **words: Any) -> Factors:
    """linear; the batch passes through"""
    if input.ndim != 2:
        raise NoRule("stft of one signal")
    (shape,) = results_of(torch.stft, (input, *args), words)
    ins = (("n", None), *((None,) for _ in tensors_in(*args, *words.values())))
    out = ("n", *(None,) * (len(shape) - 1))
    return Factors(
        ins, (out,), {"n": input.shape[0]}, linear_terms=FIRST, shapes=(shape,),
        local=zeros_if_empty,
    )  # fmt: skip
