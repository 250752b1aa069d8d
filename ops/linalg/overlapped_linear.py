"""A product with a weight, whose backward computes the gradient of the weight while the gradient of
the input is being reduced.

    x -> ReshardFunction -> EarlyReduce -> input    (``disttensor.autograd.grad_types``)

    weight -> WeightGrad -> InputGrad -> result     (a backward goes from the right)
                   input ----^

The backward of torch's own products returns both gradients in one node. Here ``InputGrad`` returns
the gradient of the input. ``EarlyReduce`` starts its reduction when the gradients of all uses are
added up, and ``ReshardFunction`` waits for the result. Autograd runs the ready node with the
highest number, and a new node has the next number. So a few numbers are reserved between these two,
and ``WeightGrad`` takes one: it runs in the meantime. It computes the same bits as torch.

Numbers stay unique, and the inputs of a node have lower numbers than the node. So a backward runs
the nodes of the program in one order, the same on all ranks, whatever a rank's piece is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from disttensor.torch_private import autocast_is_on, direct_apply, renumber
from ops.dtypes import autocast
from ops.local import LocalCall
from ops.traffic import WORTH

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

VIEWS = 3  # most views and casts between the reduction and the product


def linear(call: LocalCall) -> Any:
    """Returns the local function of ``F.linear``."""
    func = call.func

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        nodes = reserved_nodes(input, weight, bias)
        if not nodes:
            return func(input, weight, bias)
        return overlapped(func, input, weight, bias, True, nodes)

    linear.plain = func  # type: ignore[attr-defined]
    return linear if may_be_large(call, 0) else func


def matmul(call: LocalCall) -> Any:
    """Returns the local function of a product of two matrices, or of a batch with one matrix."""
    func = call.func

    def matmul(input: Tensor, other: Tensor) -> Any:
        nodes = reserved_nodes(input, other, None)
        if not nodes:
            return func(input, other)
        return overlapped(lambda x, w, _: func(x, w), input, other, None, False, nodes)

    matmul.plain = func  # type: ignore[attr-defined]
    return matmul if may_be_large(call, 0) else func


def addmm(call: LocalCall, func: Any) -> Any:
    """Returns the local function of ``torch.addmm``, which calls ``func``."""

    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> Any:
        nodes = None if factors else reserved_nodes(mat1, mat2, input)
        if not nodes:
            return func(input, mat1, mat2, **factors)
        return overlapped(lambda x, w, b: func(b, x, w), mat1, mat2, input, False, nodes)

    addmm.plain = func  # type: ignore[attr-defined]
    return addmm if may_be_large(call, 1) else func


def may_be_large(call: LocalCall, input: int) -> bool:
    """Returns True if the gradient of the argument ``input`` may be a large sum over ranks."""
    most = math.prod(call.inputs[input].shape) * 2 * torch.float64.itemsize
    return bool(call.axes("n")) and most >= WORTH


def reserved_nodes(input: Tensor, weight: Tensor, bias: Tensor | None) -> list[int] | None:
    """Returns the node numbers that are reserved after the reduction of the gradient of ``input``;
    None if no reduction starts early, or the other factor is not a weight."""
    if not (weight.requires_grad and input.requires_grad and torch.is_grad_enabled()):
        return None
    if not weight.is_leaf or weight.ndim != 2 or input.ndim < 2 or weight.is_complex():
        return None
    if bias is not None and not bias.is_leaf:
        return None
    node: Any = input.grad_fn
    for _ in range(VIEWS + 1):
        nodes: list[int] | None = getattr(node, "reserved_nodes", None)
        if nodes is not None or node is None:
            return nodes
        below = node.next_functions
        node = below[0][0] if len(below) == 1 else None
    return None


def overlapped(
    func: Product, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool,
    nodes: list[int],
) -> Tensor:  # fmt: skip
    """Computes ``func(input, weight, bias)``; ``turned``: the weight is [n, k], else [k, n]."""
    if autocast_is_on():
        input, weight, bias = (autocast(t) for t in (input, weight, bias))
    product: Tensor = _weights(weight, bias, [input], turned, func)
    renumber(product.grad_fn, nodes.pop())
    return _input(input, product, [weight], turned)


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


def _by_columns(t: Tensor) -> bool:
    return t.stride(0) == 1 and t.stride(1) == t.shape[0]


class WeightGrad(torch.autograd.Function):
    """The product. Its backward returns the gradients of the weight and the bias. ``given``: the
    input, in a list so that autograd does not track it."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, given: list[Tensor], turned: bool,
        func: Product,
    ) -> Tensor:  # fmt: skip
        ctx.turned, ctx.bias = turned, None if bias is None else bias.shape
        matrix = weight.t() if turned else weight
        ctx.by_columns = _by_columns(matrix)
        ctx.save_for_backward(given[0])
        return func(given[0], weight, bias).data  # no view, so it may be written to

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        x, g = _rows(input), _rows(grad)
        found = g.t().mm(x).t() if ctx.by_columns else x.t().mm(g)
        of_bias = g.sum_to_size(ctx.bias) if ctx.bias is not None else None
        return found.t() if ctx.turned else found, of_bias, None, None, None


class InputGrad(torch.autograd.Function):
    """Returns ``product`` unchanged. Its backward returns the gradient of the input, and passes the
    incoming gradient on."""

    hands_on = 1  # see disttensor.autograd.split_backward

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, product: Tensor, given: list[Tensor], turned: bool
    ) -> Tensor:
        ctx.turned, ctx.shape = turned, input.shape
        plain = input.ndim > 2 and input.is_contiguous()
        ctx.by_columns = not plain and _by_columns(_rows(input))
        ctx.save_for_backward(given[0])
        ctx.mark_dirty(product)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        matrix, g = weight.t() if ctx.turned else weight, _rows(grad)
        found = matrix.mm(g.t()).t() if ctx.by_columns else g.mm(matrix.t())
        return found.view(ctx.shape), grad, None, None


_weights: Any = direct_apply(WeightGrad)
_input: Any = direct_apply(InputGrad)
