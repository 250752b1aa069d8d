"""var and std. Over split dims: the mean of all ranks first, then the squared distances from it."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.core.layout import Axes
from ops.dtypes import root, widened
from ops.empty_pieces import is_empty
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.local import LocalCall
from ops.reduction.sum import reduced_dims, reduction, sizes_of, split_axes
from ops.registry import rule

Tensor = torch.Tensor


def moments(
    call: LocalCall, x: Tensor, gone: tuple[int, ...], axes: Axes, n: int, correction: float
) -> tuple[Tensor, Tensor]:
    """Returns (variance, mean) over all ranks, reduced dims kept, shared. ``n``: elements in
    all."""
    mean = call.collectives.psum(x.sum(gone, True), axes) / n
    squares = (x - call.collectives.pvary(mean, axes)).square().sum(gone, True)
    return call.collectives.psum(squares, axes) / max(n - correction, 0), mean


def _options(dim: Any, unbiased: Any, keepdim: bool, correction: Any) -> tuple[Any, float]:
    """Returns (dim, correction) of torch's overloads: var(x, False), var(x, 0, False), var(x,
    dim=0, correction=2)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = 1 if unbiased else 0
    return dim, 1 if correction is None else correction


def _moment(func: Any, rooted: bool, with_mean: bool) -> None:
    @rule(func, floats=True, doc="reduced inside: the mean, then squared distances")
    def factors(
        input: Arg, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
        correction: Any = None, out: None = None,
    ) -> Factors:  # fmt: skip
        dim, less = _options(dim, unbiased, keepdim, correction)
        gone = reduced_dims(input, dim)
        if input.dtype is not None and not input.dtype.is_floating_point:
            raise NoRule(f"{func.__name__} of {input.dtype}")

        def local(call: LocalCall) -> Any:
            axes = split_axes(call, gone)
            if not axes and not is_empty(call):  # torch warns of an empty piece
                return call.func
            n = sizes_of(call, gone)[1]
            shape = call.outputs[0].local_shape

            def moment(x: Tensor, *_: Any, **__: Any) -> Any:
                var, mean = moments(call, widened(x), gone, axes, n, less)
                first = (root(var) if rooted else var).reshape(shape).to(x.dtype)
                return (first, mean.reshape(shape).to(x.dtype)) if with_mean else first

            return moment

        return reduction(input, dim, keepdim, "inner", 1 + with_mean, local=local)


_moment(torch.var, rooted=False, with_mean=False)
_moment(torch.std, rooted=True, with_mean=False)
_moment(torch.var_mean, rooted=False, with_mean=True)
_moment(torch.std_mean, rooted=True, with_mean=True)
