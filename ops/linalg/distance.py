"""Distances, similarities and norms of rows: rows pass through, dims that are summed over stay
whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import front, named, without
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors, NoRule, letters, pointwise_factors
from ops.reduction.sum import reduction
from ops.registry import rule


@rule(*named("renorm"), exact=True)
def renorm(input: Arg, p: Any, dim: int, maxnorm: Any) -> Factors:
    """the dim passes through: each of its slices has a norm, and is whole"""
    at = front(dim, input.ndim)
    dims = without(input, set(range(input.ndim)) - {at})
    return Factors((dims,), (dims,), {at: input.shape[at]}, shapes=(input.shape,))


@rule(torch.cdist, exact=True)
def cdist(x1: Arg, x2: Arg, p: Any = 2.0, compute_mode: Any = None) -> Factors:
    """... m k, ... n k -> ... m n; k is whole"""
    return letters("... m k, ... n k -> ... m n", x1, x2, unsplittable={"k"}, local=zeros_if_empty)


@rule(F.pairwise_distance, exact=True)
def pairwise_distance(
    x1: Arg, x2: Arg, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False
) -> Factors:
    """the last dim is whole, the others broadcast"""
    f = pointwise_factors([x1, x2])
    if not f.outputs[0]:
        raise NoRule("the distance of numbers")
    last = f.outputs[0][-1]
    out = (*f.outputs[0][:-1], None) if keepdim else f.outputs[0][:-1]
    return f.replace(outputs=(out,), unsplittable={last})


@rule(torch.cosine_similarity)
def cosine_similarity(x1: Arg, x2: Arg, dim: int = 1, eps: float = 1e-8) -> Factors:
    """the dim stays whole"""
    if x1.shape != x2.shape:
        raise NoRule("cosine_similarity of shapes that broadcast")
    f = reduction(x1, dim, False, None)
    return f.replace(inputs=f.inputs * 2)
