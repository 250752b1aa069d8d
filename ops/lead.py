"""Functions that work along some dims, one for each index of the others: differences, areas,
look-ups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ops.batching import or_zero, results_of
from ops.dims import ONE, front, fronts, letters_of, named, tensors_in
from ops.factors import Arg, Dims, Factors, Letter, pointwise_factors
from ops.infer import NoRule
from ops.linalg.matmul import PRODUCT
from ops.registry import Function, rule


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
    options.setdefault("local", or_zero)
    return Factors(tuple(ins), (out,) * len(shapes), sizes, shapes=tuple(shapes), **options)


def without(input: Arg, gone: Iterable[int]) -> Dims:
    """Letters of a tensor some of whose dims stay whole."""
    gone = set(gone)
    return tuple(None if d in gone else d for d in range(input.ndim))


# Along one dim, or some ---------------------------------------------------------------------------


@rule(*named("diff"), exact=True)
def diff(input: Arg, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Factors:
    """linear; the dim is whole"""
    given = tensors_in(input, prepend, append)
    at = front(dim, input.ndim)
    ins = [without(t, [at]) for t in given]
    terms = tuple(frozenset({i}) for i in range(len(given)))
    return shaped(torch.diff, (input, n, at, prepend, append), {}, ins, ins[0], terms=terms)


@rule(torch.gradient, exact=True)
def gradient(input: Arg, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Factors:
    """linear; the dims along which differences are taken are whole"""
    places = tensors_in(*spacing) if isinstance(spacing, (list, tuple)) else tensors_in(spacing)
    dims = without(input, range(input.ndim) if dim is None else fronts(dim, input.ndim))
    words = {"spacing": spacing, "dim": dim, "edge_order": edge_order}
    words = {k: v for k, v in words.items() if v is not None}
    ins = [dims, *((None,) * t.ndim for t in places)]
    return shaped(torch.gradient, (input,), words, ins, dims, terms=ONE)


def _areas(func: Function, y: Arg, x: Any, dim: int, gone: bool, words: dict[str, Any]) -> Factors:
    at = front(dim, y.ndim)
    places = [] if x is None or x.ndim == 1 else [x]
    if places and x.ndim > y.ndim:
        raise NoRule("places of more dims than values")
    f = pointwise_factors([y, *places])
    bare = [tuple(None if d == at else d for d in dims) for dims in (*f.inputs, *f.outputs)]
    ins = [*bare[:-1], *([(None,)] if x is not None and x.ndim == 1 else [])]
    out = (*bare[-1][:at], *bare[-1][at + 1 :]) if gone else bare[-1]
    args = (y,) if x is None else (y, x)
    terms = ONE if x is None else PRODUCT
    return shaped(func, args, {**words, "dim": dim}, ins, out, terms=terms)


@rule(torch.trapz, torch.trapezoid, exact=True)
def trapezoid(y: Arg, x: Any = None, *, dx: Any = None, dim: int = -1) -> Factors:
    """linear in both; the dim is whole"""
    return _areas(torch.trapezoid, y, x, dim, True, {})


@rule(torch.cumulative_trapezoid, exact=True)
def cumulative_trapezoid(y: Arg, x: Any = None, *, dx: Any = None, dim: int = -1) -> Factors:
    """linear in both; the dim is whole"""
    return _areas(torch.cumulative_trapezoid, y, x, dim, False, {})


@rule(*named("renorm"), exact=True)
def renorm(input: Arg, p: Any, dim: int, maxnorm: Any) -> Factors:
    """the dim passes through: each of its slices has a norm, and is whole"""
    at = front(dim, input.ndim)
    dims = without(input, set(range(input.ndim)) - {at})
    return Factors((dims,), (dims,), {at: input.shape[at]}, shapes=(input.shape,))


def _cross(input: Arg, other: Arg, dim: Any) -> Factors:
    f = pointwise_factors([input, other])
    shape = f.output_shapes()[0]
    return f.but(whole=frozenset({front(dim, len(shape))}), terms=PRODUCT)


@rule(*named("cross"), exact=True)
def cross(input: Arg, other: Arg, dim: Any = None) -> Factors:
    """linear in each; the dim of three is whole, the others broadcast"""
    if dim is None:
        dim = next((d for d, s in enumerate(input.shape) if s == 3), None)
        if dim is None or input.shape != other.shape:
            raise NoRule("cross without a dim")
        at = dim  # on a rank another dim may be the first of size 3
        local = lambda call: lambda input, other, dim=None: call.func(input, other, dim=at)  # noqa: E731
        return _cross(input, other, at).but(local=local)
    return _cross(input, other, dim)


@rule(torch.linalg.cross, exact=True)
def linalg_cross(input: Arg, other: Arg, *, dim: int = -1) -> Factors:
    """linear in each; the dim of three is whole, the others broadcast"""
    return _cross(input, other, dim)


# Look-ups -----------------------------------------------------------------------------------------


@rule(torch.isin, exact=True)
def isin(elements: Any, test_elements: Any, **words: Any) -> Factors:
    """every element by itself, among all of the others"""
    if not isinstance(elements, Arg):
        raise NoRule("a number among elements")
    dims = letters_of(elements)
    ins = [dims, *((None,) * t.ndim for t in tensors_in(test_elements))]
    return Factors(tuple(ins), (dims,), dict(enumerate(elements.shape)))


@rule(torch.bucketize, exact=True)
def bucketize(input: Any, boundaries: Arg, **words: Any) -> Factors:
    """every element by itself; the boundaries are whole"""
    if not isinstance(input, Arg):
        raise NoRule("the bucket of a number")
    dims = letters_of(input)
    return Factors((dims, (None,)), (dims,), dict(enumerate(input.shape)))


@rule(torch.native_layer_norm, exact=True)
def native_layer_norm(
    input: Arg, normalized_shape: Any, weight: Any, bias: Any, eps: Any
) -> Factors:
    """the last dims are whole; so are the statistics there"""
    n = input.ndim - len(normalized_shape)
    dims = (*range(n), *(None,) * (input.ndim - n))
    ins = [dims, *((None,) * t.ndim for t in tensors_in(weight, bias))]
    return shaped(
        torch.native_layer_norm, (input, normalized_shape, weight, bias, eps), {}, ins, dims
    )


@rule(torch.stft, exact=True)
def stft(input: Arg, *args: Any, **words: Any) -> Factors:
    """linear; the batch passes through"""
    if input.ndim != 2 or tensors_in(*args):
        raise NoRule("stft of one signal")
    (shape,) = results_of(torch.stft, (input, *args), words)
    ins = (("n", None), *((None,) for _ in tensors_in(*words.values())))
    out = ("n", *(None,) * (len(shape) - 1))
    return Factors(ins, (out,), {"n": input.shape[0]}, terms=ONE, shapes=(shape,), local=or_zero)


@rule(*named("diagonal_scatter"), exact=True)
def diagonal_scatter(
    input: Arg, src: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Factors:
    """linear in both together; the two dims are whole"""
    gone = fronts((dim1, dim2), input.ndim)
    dims = without(input, gone)
    rest = (*(d for d in dims if d is not None), None)
    return shaped(
        torch.diagonal_scatter, (input, src, offset, dim1, dim2), {}, [dims, rest], dims,
        terms=(frozenset({0}), frozenset({1})),
    )  # fmt: skip


@rule(torch.searchsorted, exact=True)
def searchsorted(sorted_sequence: Arg, input: Any, **words: Any) -> Factors:
    """every value by itself in a sequence that is whole; rows of values in rows of sequences"""
    if not isinstance(input, Arg) or tensors_in(*words.values()):
        raise NoRule("the place of a number, or places by a sorter")
    if sorted_sequence.ndim == 1:
        dims: Dims = letters_of(input)
        return Factors(((None,), dims), (dims,), dict(enumerate(input.shape)))
    n = sorted_sequence.ndim - 1
    rows = letters_of(sorted_sequence)[:-1]
    if input.ndim != n + 1 or input.shape[:-1] != sorted_sequence.shape[:-1]:
        raise NoRule("rows that do not fit")
    return Factors(
        ((*rows, None), (*rows, "v")),
        ((*rows, "v"),),
        {**dict(enumerate(sorted_sequence.shape[:-1])), "v": input.shape[-1]},
    )
