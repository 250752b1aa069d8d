"""Matrix products: batch and outer dims pass through, the contracted dim is reduced (Partial(sum))."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.factors import Arg, Factors, letters
from ops.registry import rule

SUM_K = {"k": "sum"}
PRODUCT = (frozenset({0, 1}),)


@rule(torch.matmul)
def matmul(input: Arg, other: Arg) -> Factors:
    """... m k, ... k n -> ... m n; vectors lose their dim"""
    left = "... m k" if input.ndim > 2 else "m k" if input.ndim == 2 else "k"
    right = "... k n" if other.ndim > 2 else "k n" if other.ndim == 2 else "k"
    out = " ".join(
        word
        for word, there in (("...", max(input.ndim, other.ndim) > 2), ("m", input.ndim > 1), ("n", other.ndim > 1))
        if there
    )
    return letters(f"{left}, {right} -> {out}", input, other, reduced=SUM_K, terms=PRODUCT)


@rule(F.linear)
def linear(input: Arg, weight: Arg, bias: Any = None) -> Factors:
    """... k, n k -> ... n; the bias joins a pending sum once"""
    out = "... n" if weight.ndim == 2 else "..."
    w = "n k" if weight.ndim == 2 else "k"
    if bias is None:
        return letters(f"... k, {w} -> {out}", input, weight, reduced=SUM_K, terms=PRODUCT)
    b = "n" if weight.ndim == 2 else ""
    return letters(f"... k, {w}, {b} -> {out}", input, weight, bias, reduced=SUM_K, terms=(*PRODUCT, frozenset({2})))
