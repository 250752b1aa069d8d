"""Products other than matrix products: inner, tensordot, kron, cross, chains, powers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ops.dims import PRODUCT, front, named
from ops.empty_pieces import padded_if_empty
from ops.factors import Arg, Dims, Factors, Letter, NoRule, letters, pointwise_factors
from ops.linalg.matmul import SUM_K
from ops.reduction.sum import reduction
from ops.registry import rule


@rule(torch.linalg.cross, exact=True)
def linalg_cross(input: Arg, other: Arg, *, dim: int = -1) -> Factors:
    """linear in each; the dim of three is whole, the others broadcast"""
    f = pointwise_factors([input, other], linear_terms=PRODUCT)
    return f.replace(unsplittable={front(dim, len(f.outputs[0]))})


@rule(*named("cross"), exact=True)
def cross(input: Arg, other: Arg, dim: Any = None) -> Factors:
    """linear in each; the dim of three is whole, the others broadcast"""
    if dim is not None:
        return linalg_cross(input, other, dim=dim)
    at = next((d for d, s in enumerate(input.shape) if s == 3), None)
    if at is None or input.shape != other.shape:
        raise NoRule("cross without a dim")
    # on a rank another dim may be the first of size 3
    local = lambda call: lambda input, other, dim=None: call.func(input, other, dim=at)  # noqa: E731
    return linalg_cross(input, other, dim=at).replace(local=local)


@rule(*named("_grouped_mm", "grouped_mm", places=(torch, torch.nn.functional)), exact=True)
def grouped_mm(
    input: Arg, mat2: Arg, offs: Any = None, bias: Any = None, out_dtype: Any = None, **words: Any
) -> Factors:
    """m k, g k n, g -> m n: rows in groups, each with a matrix of its own; k: sum"""
    if (input.ndim, mat2.ndim) != (2, 3) or offs is None or words.get("bias", bias) is not None:
        raise NoRule("grouped_mm other than of rows with a matrix for each group")
    if input.shape[-1] != mat2.shape[1]:
        raise NoRule("grouped_mm of sizes that do not fit")
    whole = set("mg")
    f = letters("m k, g k n, g -> m n", input, mat2, offs, reduced=SUM_K, unsplittable=whole)
    return f.replace(linear_terms=PRODUCT, local=_aligned)


def _aligned(call: Any) -> Any:
    """Returns the local function, which pads pieces whose rows are empty, or no multiple of 16
    bytes, with zeros."""

    def grouped_mm(input: Any, mat2: Any, *more: Any, **words: Any) -> Any:
        unit = 16 // input.element_size()
        k, n = mat2.shape[1:]
        gaps = [-s % unit if s else unit for s in (k, n)]
        if not any(gaps):
            return call.func(input, mat2, *more, **words)
        pad = torch.nn.functional.pad
        wide = pad(mat2, (0, gaps[1], 0, gaps[0]))
        return call.func(pad(input, (0, gaps[0])), wide, *more, **words)[:, :n]

    return grouped_mm if call.split else call.func


@rule(torch.linalg.vander, exact=True)
def vander(x: Arg, *, N: Any = None) -> Factors:
    """... n -> ... n powers: every dim passes through"""
    if not x.ndim or 0 in x.shape:
        raise NoRule("vander of a number")
    powers = x.shape[-1] if N is None else N
    dims = tuple(range(x.ndim))
    local = lambda call: lambda x, N=None: call.func(x, N=powers)  # noqa: E731
    return Factors((dims,), ((*dims, "powers"),), {"powers": powers}, local=local)


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
    out = (*ins[0][:-1], *ins[-1][1:])
    reduced: dict[Letter, str] = dict.fromkeys(names[1:-1], "sum")
    every = set(range(len(tensors)))
    return Factors(tuple(ins), (out,), reduced=reduced, linear_terms=(every,))


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
    return Factors(ins, (out,), sizes, {}, set(ins[1]), set(ins[0]), PRODUCT)


@rule(torch.inner)
def inner(input: Arg, other: Arg) -> Factors:
    """m... k, n... k -> m... n...; with a 0-d tensor a plain product"""
    if not input.ndim or not other.ndim:
        dims = tuple(range(max(input.ndim, other.ndim)))
        scalar = (dims[: input.ndim], dims[: other.ndim])
        return Factors(scalar, (dims,), linear_terms=PRODUCT)
    return tensordot(input, other, ([-1], [-1]))


@rule(torch.linalg.vecdot)
def vecdot(input: Arg, other: Arg, *, dim: int = -1, out: None = None) -> Factors:
    """the sum of products over one dim of two tensors that broadcast"""
    if input.ndim != other.ndim or input.shape != other.shape:
        raise NoRule("vecdot of shapes that broadcast")
    f = reduction(input, dim, False, "sum", linear_terms=PRODUCT)
    return f.replace(inputs=f.inputs * 2)


@rule(torch.bilinear)
def bilinear(input1: Arg, input2: Arg, weight: Arg, bias: Any = None) -> Factors:
    """... i, ... j, o i j -> ... o"""
    local = partial(padded_if_empty, value=0.0)
    options: dict[str, Any] = {"reduced": {"i": "sum", "j": "sum"}, "local": local}
    product = {0, 1, 2}
    if bias is None:
        pattern = "... i, ... j, o i j -> ... o"
        return letters(pattern, input1, input2, weight, linear_terms=(product,), **options)
    pattern = "... i, ... j, o i j, o -> ... o"
    return letters(pattern, input1, input2, weight, bias, linear_terms=(product, {3}), **options)


@rule(torch.tensordot)
def tensordot(a: Arg, b: Arg, dims: Any = 2, out: None = None) -> Factors:
    """the named dims of a and b are multiplied and summed; what is left of a, then of b"""
    if isinstance(dims, int):
        left, right = tuple(range(a.ndim - dims, a.ndim)), tuple(range(dims))
    elif isinstance(dims, (list, tuple)) and len(dims) == 2:
        pairs = [(d,) if isinstance(d, int) else tuple(d) for d in dims]
        left, right = tuple(d % a.ndim for d in pairs[0]), tuple(d % b.ndim for d in pairs[1])
    else:
        raise NoRule("tensordot: dims as a tensor")
    names_a: list[Any] = [f"a{i}" for i in range(a.ndim)]
    names_b: list[Any] = [f"b{i}" for i in range(b.ndim)]
    for n, (i, j) in enumerate(zip(left, right, strict=True)):
        if a.shape[i] != b.shape[j]:  # size 1 is summed on its own
            raise NoRule("tensordot of dims that differ")
        names_a[i] = names_b[j] = f"k{n}"
    reduced: dict[Letter, str] = {f"k{n}": "sum" for n in range(len(left))}
    kept = tuple(x for x in (*names_a, *names_b) if x not in reduced)
    ins = tuple(names_a), tuple(names_b)
    return Factors(ins, (kept,), reduced=reduced, linear_terms=PRODUCT)
