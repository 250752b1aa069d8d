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


def _carried_out(f: Factors, local: LocalMaker) -> Factors:
    """Returns ``f`` with a local function, which computes each element as torch's own does."""
    return f.replace(local=local, independent=set(f.sizes))


def _product(input: Arg, other: Arg) -> Factors:
    """... m k, ... k n -> ... m n; vectors lose their dim"""
    left = "... m k" if input.ndim > 2 else "m k" if input.ndim == 2 else "k"
    right = "... k n" if other.ndim > 2 else "k n" if other.ndim == 2 else "k"
    lead = "... " if max(input.ndim, other.ndim) > 2 else ""
    out = lead + "m " * (input.ndim > 1) + "n" * (other.ndim > 1)
    return letters(f"{left}, {right} -> {out}", input, other, reduced=SUM_K, linear_terms=PRODUCT)


@rule(torch.matmul, torch.linalg.matmul, torch.Tensor.__matmul__, sizes="letters")
def matmul(input: Arg, other: Arg, out: None = None) -> Factors:
    """... m k, ... k n -> ... m n; vectors lose their dim"""
    return _carried_out(_product(input, other), overlapped_linear.matmul)


@rule(torch.Tensor.__rmatmul__, exact=True)
def rmatmul(input: Arg, other: Arg) -> Factors:
    """other @ input: the tensors come in the opposite order"""
    f = _product(other, input)
    return f.replace(inputs=f.inputs[::-1])


def _fixed(*funcs: Any, pattern: str) -> None:
    """Registers a product of two tensors of fixed ndims."""

    @rule(*funcs, sizes="letters", doc=pattern)
    def factors(input: Arg, other: Arg, *rest: Any, **options: Any) -> Factors:
        f = letters(pattern, input, other, reduced=SUM_K, linear_terms=PRODUCT)
        return _carried_out(f, overlapped_linear.matmul) if torch.mm in funcs else f


_fixed(torch.mm, pattern="m k, k n -> m n")
_fixed(torch.bmm, pattern="b m k, b k n -> b m n")
_fixed(torch.mv, pattern="m k, k -> m")
_fixed(torch.dot, torch.vdot, pattern="k, k -> ")
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
    func: Any, pattern: str, out: str, reduced: dict[Letter, str], local: LocalMaker = _broadcast
) -> None:
    """Registers beta * input + alpha * (a product of two): input broadcasts to the result and joins
    a pending sum once."""

    @rule(func, integers=False, doc=f"input + ({pattern} -> {out})")
    def factors(input: Arg, first: Arg, second: Arg, *, beta: Any = 1, alpha: Any = 1) -> Factors:
        words = out.split()
        if input.ndim > len(words):
            raise RuntimeError(f"{func.__name__}: the input has more dims than the result")
        own = " ".join(words[len(words) - input.ndim :])
        # the product first, so that its sizes count, then back in the call's order
        f = letters(
            f"{pattern}, {own} -> {out}", first, second, input, reduced=reduced, local=local
        )
        return f.replace(
            inputs=(f.inputs[2], f.inputs[0], f.inputs[1]),
            linear_terms=(*FIRST, {1, 2}),
        )


_sum_and_product(torch.addmm, "m k, k n", "m n", SUM_K, _addmm)
_sum_and_product(torch.addmv, "m k, k", "m", SUM_K)
_sum_and_product(torch.baddbmm, "b m k, b k n", "b m n", SUM_K)
_sum_and_product(torch.addbmm, "b m k, b k n", "m n", {"b": "sum", "k": "sum"})
_sum_and_product(torch.addr, "m, n", "m n", {})


@rule(F.linear, sizes="letters")
def linear(input: Arg, weight: Arg, bias: Any = None) -> Factors:
    """... k, n k -> ... n; the bias joins a pending sum once"""
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
