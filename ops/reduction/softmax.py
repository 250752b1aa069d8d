"""softmax and logsumexp. Over a split dim the maximum and the sum of exponentials are reduced
inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from disttensor.core.layout import Axes
from ops.dtypes import wide, widened
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import Collectives, LocalCall
from ops.reduction.max_min import local_extreme
from ops.reduction.sum import inner, reduced_dims, reduction
from ops.registry import rule

Tensor = torch.Tensor


def maximum(call: LocalCall, x: Tensor, gone: tuple[int, ...], axes: Axes) -> Tensor:
    """Returns the maximum over all ranks, which is subtracted before exp, with reduced dims kept
    and without a gradient."""
    return call.collectives.all_reduce(local_extreme(x.detach(), gone, True), "max", axes)


def _softmax(*funcs: Any, log: bool, sign: int = 1) -> None:
    @rule(*funcs, sizes="letters", doc="pass-through; the named dim by inner reductions")
    def factors(
        input: Arg, dim: Any = None, third: Any = None, dtype: Any = None, _stacklevel: int = 3
    ) -> Factors:
        if dim is None:
            raise NoRule(f"{funcs[0].__name__} without a dim")
        gone = reduced_dims(input, dim)
        # of F.softmax the third is _stacklevel
        to = third if isinstance(third, torch.dtype) else dtype

        def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
            given = to or x.dtype
            x = x.to(wide(given))
            x = x if sign > 0 else -x
            x = x - maximum(call, x, gone, axes)
            e = x.exp()
            s = call.collectives.pvary(call.collectives.psum(e.sum(gone, True), axes), axes)
            return (x - s.log() if log else e / s).to(given)

        others = set(range(input.ndim)) - {*gone}
        return pointwise_factors([input], local=inner(gone, reduce), independent=others)


_softmax(F.softmax, torch.softmax, torch.special.softmax, log=False)
_softmax(F.log_softmax, torch.log_softmax, torch.special.log_softmax, log=True)
_softmax(F.softmin, log=False, sign=-1)


class _LogSumExp(torch.autograd.Function):
    """``y`` as a function of x: dy/dx = exp(x - y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, collectives: Collectives, axes: Axes) -> Tensor:
        y = y.clone()
        ctx.save_for_backward(x, y)
        ctx.with_ = collectives, axes
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        collectives, axes = ctx.with_
        y = collectives.pvary(y, axes)
        return collectives.pvary(grad, axes) * (x - y).exp(), None, None, None


@rule(torch.logsumexp, torch.special.logsumexp)
def logsumexp(input: Arg, dim: Any, keepdim: bool = False, *, out: None = None) -> Factors:
    """reduced inside: the maximum, then the sum of exponentials"""
    gone = reduced_dims(input, dim)
    if input.dtype is not None and not input.dtype.is_floating_point:
        raise NoRule("logsumexp of integers")
    if dim in ((), []) and not keepdim and input.ndim:
        ones = [1] * input.ndim
        raise RuntimeError(f"output with shape [] doesn't match the broadcast shape {ones}")

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
        x_wide = widened(x)
        data = x_wide.detach()
        m = maximum(call, data, gone, axes)
        m = m.masked_fill(m.abs() == torch.inf, 0)
        s = call.collectives.all_reduce((data - m).exp().sum(gone, True), "sum", axes)
        y = s.log() + m
        if x.requires_grad:
            y = _LogSumExp.apply(x_wide, y, call.collectives, axes)
        return y.reshape(call.outputs[0].local_shape).to(x.dtype)

    return reduction(input, dim, keepdim, "inner", local=inner(gone, reduce))
