"""Matrix products: batch and outer dims pass through, the contracted dim is reduced
(Partial(sum))."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import FIRST, PRODUCT
from ops.empty_pieces import is_empty
from ops.factors import Arg, Factors, Letter, LocalMaker, NoRule, letters
from ops.linalg import overlapped_linear
from ops.local import LocalCall
from ops.registry import rule

SUM_K: dict[Letter, str] = {"k": "sum"}


def fit(name: str, a: Arg, i: int, b: Arg, j: int) -> None:
    """Checks that the multiplied dims have the same size. Raises RuntimeError on all ranks before
    any of them computes."""
    if a.shape[i] != b.shape[j]:
        raise RuntimeError(
            f"{name}: shapes {list(a.shape)} and {list(b.shape)} do not fit: "
            f"dims of {a.shape[i]} and {b.shape[j]} would be multiplied and summed"
        )


def _carried_out(f: Factors, local: LocalMaker) -> Factors:
    """Returns ``f`` with a local function, which computes each element as torch's own does."""
    return f.replace(local=local, independent=set(f.sizes))


def _product(name: str, input: Arg, other: Arg) -> Factors:
    """... m k, ... k n -> ... m n; vectors lose their dim"""
    if not input.ndim or not other.ndim:
        raise RuntimeError(
            f"{name}: both arguments need at least one dim, got {input.ndim} and {other.ndim}"
        )
    fit(name, input, -1, other, -2 if other.ndim > 1 else 0)
    left = "... m k" if input.ndim > 2 else "m k" if input.ndim == 2 else "k"
    right = "... k n" if other.ndim > 2 else "k n" if other.ndim == 2 else "k"
    lead = "... " if max(input.ndim, other.ndim) > 2 else ""
    out = lead + "m " * (input.ndim > 1) + "n" * (other.ndim > 1)
    return letters(f"{left}, {right} -> {out}", input, other, reduced=SUM_K, linear_terms=PRODUCT)


@rule(torch.matmul, torch.linalg.matmul, torch.Tensor.__matmul__, sizes="letters")
def matmul(input: Arg, other: Arg, out: None = None) -> Factors:
    """... m k, ... k n -> ... m n; vectors lose their dim"""
    return _carried_out(_product("matmul", input, other), overlapped_linear.matmul)


@rule(torch.Tensor.__rmatmul__, exact=True)
def rmatmul(input: Arg, other: Arg) -> Factors:
    """other @ input: the tensors come in the opposite order"""
    f = _product("matmul", other, input)
    return f.replace(inputs=f.inputs[::-1])


def _fixed(*funcs: Any, pattern: str, check: tuple[int, int] | None = None) -> None:
    """Registers a product of two tensors of fixed ndims; ``check``: the dims that are
    multiplied."""
    name = funcs[0].__name__
    ndims = [len(t.split()) for t in pattern.split("->")[0].split(",")]

    @rule(*funcs, sizes="letters", doc=pattern)
    def factors(input: Arg, other: Arg, *rest: Any, **options: Any) -> Factors:
        if [input.ndim, other.ndim] != ndims:
            raise RuntimeError(
                f"{name}: expects tensors of {ndims[0]} and {ndims[1]} dims, "
                f"got {list(input.shape)} and {list(other.shape)}"
            )
        if check:
            fit(name, input, check[0], other, check[1])
        if name == "bmm":
            fit(name, input, 0, other, 0)
        f = letters(pattern, input, other, reduced=SUM_K, linear_terms=PRODUCT)
        return _carried_out(f, overlapped_linear.matmul) if name == "mm" else f


_fixed(torch.mm, pattern="m k, k n -> m n", check=(1, 0))
_fixed(torch.bmm, pattern="b m k, b k n -> b m n", check=(2, 1))
_fixed(torch.mv, pattern="m k, k -> m", check=(1, 0))
_fixed(torch.dot, torch.vdot, pattern="k, k -> ", check=(0, 0))
_fixed(torch.outer, torch.ger, pattern="m, n -> m n")


def _broadcast(call: LocalCall) -> Any:
    """Returns the local function, which broadcasts the input of addmv: torch does not if the matrix
    has no elements."""
    func, shape = call.func, call.outputs[0].local_shape
    if not is_empty(call) or call.inputs[0].local_shape == shape:
        return func
    return lambda input, *args, **words: func(input.expand(shape), *args, **words)


def _addmm(call: LocalCall) -> Any:
    return overlapped_linear.addmm(call, _broadcast(call))


def _sum_and_product(
    func: Any, pattern: str, out: str, fits: tuple[tuple[int, int], ...],
    reduced: dict[Letter, str], local: LocalMaker = _broadcast,
) -> None:  # fmt: skip
    """Registers beta * input + alpha * (a product of two): input broadcasts to the result and joins
    a pending sum once."""
    name = func.__name__

    @rule(func, integers=False, doc=f"input + ({pattern} -> {out})")
    def factors(input: Arg, first: Arg, second: Arg, *, beta: Any = 1, alpha: Any = 1) -> Factors:
        for i, j in fits:
            fit(name, first, i, second, j)
        words = out.split()
        if input.ndim > len(words):
            raise RuntimeError(
                f"{name}: input of shape {list(input.shape)} has more dims than the result"
            )
        own = " ".join(words[len(words) - input.ndim :])
        # the product first, so that its sizes count, then back in the call's order
        f = letters(
            f"{pattern}, {own} -> {out}", first, second, input, reduced=reduced, local=local
        )
        for letter, size in zip(f.inputs[2], input.shape, strict=True):
            if letter is not None and f.sizes[letter] != size:
                raise RuntimeError(
                    f"{name}: input of shape {list(input.shape)} does not broadcast to the product"
                )
        return f.replace(
            inputs=(f.inputs[2], f.inputs[0], f.inputs[1]),
            linear_terms=(*FIRST, {1, 2}),
        )


_sum_and_product(torch.addmm, "m k, k n", "m n", ((1, 0),), SUM_K, _addmm)
_sum_and_product(torch.addmv, "m k, k", "m", ((1, 0),), SUM_K)
_sum_and_product(torch.baddbmm, "b m k, b k n", "b m n", ((0, 0), (2, 1)), SUM_K)
_sum_and_product(torch.addbmm, "b m k, b k n", "m n", ((0, 0), (2, 1)), {"b": "sum", "k": "sum"})
_sum_and_product(torch.addr, "m, n", "m n", (), {})


@rule(F.linear, sizes="letters")
def linear(input: Arg, weight: Arg, bias: Any = None) -> Factors:
    """... k, n k -> ... n; the bias joins a pending sum once"""
    fit("linear", input, -1, weight, -1)
    out = "... n" if weight.ndim == 2 else "..."
    w = "n k" if weight.ndim == 2 else "k"
    tensors, b, terms = [input, weight], "", PRODUCT
    if bias is not None:
        outputs = weight.shape[0] if weight.ndim == 2 and bias.ndim else 1
        if bias.ndim > 1 or bias.numel() != outputs:
            raise NoRule("linear with a bias that is no vector of the outputs")
        tensors, b, terms = [*tensors, bias], ", n" if bias.ndim else ",", (*terms, {2})
    f = letters(f"... k, {w}{b} -> {out}", *tensors, reduced=SUM_K, linear_terms=terms)
    return _carried_out(f, overlapped_linear.linear)
