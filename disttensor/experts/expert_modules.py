"""Modules of transformers that hold all experts of a layer in a few tensors, run by
``dispatch_tokens``, and the product of the rows of each expert with its own matrix.

The decorator ``use_experts_implementation`` of transformers makes their class. It sets attributes
that describe the layout of the tensors; these attributes identify such a module, whatever its class
is. The implementation that a configuration names (eager, batched_mm, grouped_mm) is ignored,
because all compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from disttensor.experts.dispatch_tokens import DispatchedTokens, combine_tokens, dispatch_tokens
from disttensor.trace.instance_forward import InstanceForward

Tensor = torch.Tensor
_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


def is_experts(module: nn.Module) -> bool:
    """Returns True if the module holds experts in the form of transformers."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS):
        return False
    if module.has_post_expert_norm or not callable(getattr(module, "_apply_gate", None)):
        return False
    return all(isinstance(getattr(module, name, None), Tensor) for name in _names(module))


def _names(module: Any) -> list[str]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [first, "down_proj"]
    return weights + [f"{name}_bias" for name in weights] if module.has_bias else weights


def attach(module: nn.Module) -> None:
    """Replaces the forward of the experts in ``module``."""
    for m in module.modules():
        if "forward" not in m.__dict__ and is_experts(m):
            ExpertsForward(m).put()


class ExpertsForward(InstanceForward):
    """The ``forward`` of one such module: hidden states [t, d], indices and weights [t, k] -> [t,
    d]. ``dispatched``: of the last call, for ``expert_load``."""

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__({"module": module})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: Any = state["module"]
        self.dispatched: DispatchedTokens | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3:
            args = self.__signature__.bind(*args, **kwargs).args
        tokens, indices, weights = args
        module = self.module
        parameters = [getattr(module, name) for name in _names(module)]
        sent = dispatch_tokens(tokens, indices, parameters[0].shape[0])
        out = combine_tokens(sent.apply(self.compute, *parameters), weights)
        self.dispatched = sent
        return out

    def compute(self, rows: Tensor, counts: list[int], *parameters: Tensor) -> Tensor:
        """Computes the results of the experts of this rank for their rows."""
        module = self.module
        turned = not module.is_transposed
        up, down, *biases = parameters
        hidden = grouped_product(rows, up, counts, turned)
        if biases:
            repeats = torch.tensor(counts, device=rows.device)
            biases = [bias.repeat_interleave(repeats, 0, output_size=len(rows)) for bias in biases]
            hidden = hidden + biases[0]
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        out = grouped_product(hidden, down, counts, turned)
        return out + biases[1] if biases else out


# Products ----------------------------------------------------------------------------------------


def grouped_product(rows: Tensor, weight: Tensor, counts: Sequence[int], turned: bool) -> Tensor:
    """Multiplies rows [n, i], the first counts[0] with weight[0], and so on. weight is
    [groups, i, o], or [groups, o, i] if ``turned``; the result [n, o] has the dtype of autocast, or
    else of the weight. Differentiable to every order."""
    device = rows.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return Product.apply(rows.to(dtype), weight.to(dtype), tuple(counts), turned)


def _parts(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Yields (group, first row, one past the last) of the groups that have rows."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(g, start, stop) for g, (start, stop) in enumerate(ends) if stop > start]


class Product(torch.autograd.Function):
    """rows of group g times weight[g], or its transpose if ``turned``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Any, turned: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.how = counts, turned
        w = weight.transpose(1, 2) if turned else weight
        out = rows.new_empty((len(rows), w.shape[2]))
        for g, start, stop in _parts(counts):
            torch.mm(rows[start:stop], w[g], out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        counts, turned = ctx.how
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = Product.apply(grad, weight, counts, not turned)
        if ctx.needs_input_grad[1]:
            of_weight = Outer.apply(*((grad, rows) if turned else (rows, grad)), counts)
        return of_rows, of_weight, None, None


class Outer(torch.autograd.Function):
    """[n, i], [n, o] -> [groups, i, o]: the sum of outer products of each group's rows."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, counts: Any) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.counts = counts
        out = left.new_empty((len(counts), left.shape[1], right.shape[1]))
        for g, count in enumerate(counts):
            if not count:
                out[g] = 0
        for g, start, stop in _parts(counts):
            torch.mm(left[start:stop].t(), right[start:stop], out=out[g])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left, right = ctx.saved_tensors
        of_left = Product.apply(right, grad, ctx.counts, True)
        return of_left, Product.apply(left, grad, ctx.counts, False), None
