"""Decompositions of the last two dims, products of several matrices, distances between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ops.batching import batched_factors, or_zero
from ops.dims import named, tensors_in
from ops.factors import Arg, Dims, Factors, Letter, letters, pointwise_factors
from ops.infer import NoRule
from ops.linalg.matmul import PRODUCT
from ops.registry import Function, rule


def _matrices(func: Function, core: int = 2) -> None:
    def factors(input: Arg, *args: Any, **words: Any) -> Factors:
        if tensors_in(*args, *words.values()):
            raise NoRule("tolerances given by a tensor")
        return batched_factors(func, (input, *args), words, [input], [core], local=or_zero)

    factors.__name__, factors.__doc__ = func.__name__, "... m n -> ...: batch dims pass"
    rule(func, exact=True, floats=True)(factors)


for _func in (
    *named("pinverse"),
    *named(*["pinv", "cond", "matrix_rank", "lu"], places=(torch.linalg,)),
):
    _matrices(_func)


@rule(torch.linalg.vander, exact=True)
def vander(x: Arg, *, N: Any = None) -> Factors:
    """... n -> ... n powers: every dim passes through"""
    if not x.ndim or 0 in x.shape:
        raise NoRule("vander of a number")
    powers = x.shape[-1] if N is None else N
    dims = tuple(range(x.ndim))
    sizes: dict[Letter, int] = {**dict(enumerate(x.shape)), "powers": powers}
    local = lambda call: lambda x, N=None: call.func(x, N=powers)  # noqa: E731
    return Factors((dims,), ((*dims, "powers"),), sizes, local=local)


@rule(torch.linalg.multi_dot, exact=True)
def multi_dot(tensors: Sequence[Arg], **words: Any) -> Factors:
    """a b, b c, c d -> a d: rows of the first and columns of the last pass; a split inner dim gives
    P(sum)"""
    names = [chr(ord("a") + i) for i in range(len(tensors) + 1)]
    ins: list[Dims] = [tuple(names[i : i + 2]) for i in range(len(tensors))]
    if tensors[0].ndim == 1:
        ins[0] = ins[0][1:]
    if tensors[-1].ndim == 1:
        ins[-1] = ins[-1][:1]
    sizes: dict[Letter, int] = {}
    for t, dims in zip(tensors, ins, strict=True):
        for d, s in zip(dims, t.shape, strict=True):
            if sizes.setdefault(d, s) != s:
                raise NoRule("matrices that do not fit")
    out = (*ins[0][:-1], *ins[-1][1:])
    reduced: dict[Letter, str] = dict.fromkeys(names[1:-1], "sum")
    return Factors(tuple(ins), (out,), sizes, reduced, terms=(frozenset(range(len(tensors))),))


@rule(*named("kron"), exact=True)
def kron(input: Arg, other: Arg) -> Factors:
    """each dim of the result merges two; the first tensor's may be split evenly"""
    n = max(input.ndim, other.ndim)
    a, b = n - input.ndim, n - other.ndim
    sizes: dict[Letter, int] = {f"a{a + i}": s for i, s in enumerate(input.shape)}
    sizes.update({f"b{b + i}": s for i, s in enumerate(other.shape)})
    pairs = [tuple(x for x in (f"a{i}", f"b{i}") if x in sizes) for i in range(n)]
    out = tuple(pair if len(pair) == 2 else pair[0] for pair in pairs)
    ins = (
        tuple(f"a{a + i}" for i in range(input.ndim)),
        tuple(f"b{b + i}" for i in range(other.ndim)),
    )
    even = frozenset(ins[0])
    return Factors(ins, (out,), sizes, whole=frozenset(ins[1]), even=even, terms=PRODUCT)


# Distances ----------------------------------------------------------------------------------------


@rule(torch.cdist, exact=True)
def cdist(x1: Arg, x2: Arg, p: Any = 2.0, compute_mode: Any = None) -> Factors:
    """... m k, ... n k -> ... m n; k is whole"""
    return letters("... m k, ... n k -> ... m n", x1, x2, whole=frozenset("k"), local=or_zero)


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
    return f.but(outputs=(out,), whole=frozenset({last}))
