"""Padding and interpolation: batch and channels pass through, dims that are padded or resized stay
whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from ops.batching import batched_factors, shaped
from ops.dims import FIRST, without
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.registry import rule


def padded(input: Arg, sizes: Sequence[int], mode: str) -> Factors:
    """Returns the factors of padding by input elements (reflect, ...): padded dims are whole."""
    gone = {input.ndim - 1 - i // 2 for i, n in enumerate(sizes) if n}
    dims = without(input, gone)
    return shaped(F.pad, (input, sizes, mode), {}, [dims], dims, linear_terms=FIRST)


@rule(F.interpolate, exact=True, floats=True)
def interpolate(
    input: Arg, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None, antialias: bool = False,
) -> Factors:  # fmt: skip
    """linear; batch and channels pass through"""
    args = (input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if input.ndim < 3 or 0 in input.shape:
        raise NoRule("interpolate wants batch, channels and at least one more dim")
    return batched_factors(
        F.interpolate, args, {}, [input], [input.ndim - 2], linear_terms=FIRST, local=zeros_if_empty
    )
