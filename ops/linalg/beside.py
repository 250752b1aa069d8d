"""A product with a weight, whose backward computes the gradient of the weight while the gradient of
the input is being reduced.

The backward of torch's own products returns both gradients in one node. Here they have two nodes:

    weight -> Weights -> Input -> result    (a backward goes from the right)
                input ----^

``Input`` returns the gradient of the input, whose reduction can then start: see
``disttensor.autograd.ahead``. ``Weights`` has a number that was reserved there, so it runs next.
Both compute the same bits as torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from disttensor.torch_private import autocast_is_on, direct_apply, renumber
from ops.local import LocalCall
from ops.traffic import WORTH

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

VIEWS = 3  # at most so many views or casts between the reduction and the product


def linear(call: LocalCall) -> Any:
    """Returns the local function of ``F.linear``."""
    func = call.func

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        room = room_of(input, weight, bias)
        if not room:
            return func(input, weight, bias)
        return beside(func, input, weight, bias, True, room)

    return linear if apart(call, 0) else func


def matmul(call: LocalCall) -> Any:
    """Returns the local function of a product of two matrices, or of a batch with one matrix."""
    func = call.func

    def matmul(input: Tensor, other: Tensor) -> Any:
        room = room_of(input, other, None)
        if not room:
            return func(input, other)
        return beside(lambda x, w, _: func(x, w), input, other, None, False, room)

    return matmul if apart(call, 0) else func


def addmm(call: LocalCall, func: Any) -> Any:
    """Returns the local function of ``torch.addmm``, which calls ``func``."""

    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> Any:
        room = None if factors else room_of(mat1, mat2, input)
        if not room:
            return func(input, mat1, mat2, **factors)
        return beside(lambda x, w, b: func(b, x, w), mat1, mat2, input, False, room)

    return addmm if apart(call, 1) else func


def apart(call: LocalCall, input: int) -> bool:
    """Returns True if the gradient of argument ``input`` may be a large sum over ranks."""
    most = math.prod(call.inputs[input].shape) * 2 * torch.float64.itemsize
    return bool(call.axes("n")) and most >= WORTH


def room_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> list[int] | None:
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
        room: list[int] | None = getattr(node, "room", None)
        if room is not None or node is None:
            return room
        below = node.next_functions
        node = below[0][0] if len(below) == 1 else None
    return None


def beside(
    func: Product, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool,
    room: list[int],
) -> Tensor:  # fmt: skip
    """Computes ``func(input, weight, bias)``; ``turned``: the weight is [n, k], else [k, n]."""
    if autocast_is_on():
        input, weight, bias = _cast(input), _cast(weight), None if bias is None else _cast(bias)
    product: Tensor = _weights(weight, bias, [input], turned, func)
    renumber(product.grad_fn, room.pop())
    result: Tensor = _input(input, product, [weight], turned)
    return result


def _cast(t: Tensor) -> Tensor:
    """Casts an argument of a product as autocast does."""
    device = t.device.type
    if not torch.is_autocast_enabled(device) or t.dtype is torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(device))


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


def _by_columns(t: Tensor) -> bool:
    return t.stride(0) == 1 and t.stride(1) == t.shape[0]


class Weights(torch.autograd.Function):
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


class Input(torch.autograd.Function):
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


_weights: Any = direct_apply(Weights)
_input: Any = direct_apply(Input)
