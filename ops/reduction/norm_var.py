"""Norms of vectors, var and std. Over split dims the powers are summed over all ranks, or their
maximum is taken; for var the mean of all ranks first, then the squared distances from it, in
float64 as in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from disttensor.core.layout import Axes
from ops.dims import fronts, without
from ops.dtypes import root, widened
from ops.empty_pieces import is_empty, zeros_if_empty
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import LocalCall, LocalShardInfo
from ops.reduction.max_min import best_of
from ops.reduction.sum import inner, reduced_dims, reduction, sizes_of, split_axes
from ops.registry import rule

Tensor = torch.Tensor


def powers(x: Tensor, p: float) -> Tensor:
    """Returns absolute values to the power of p. Their gradient at 0 is 0, or NaN of NaN."""
    if p in (1, 2):
        return x.abs() if p == 1 else x.square()
    size = x.abs()
    at_zero = size == 0
    return torch.where(at_zero, x * 0, size.masked_fill(at_zero, 1).pow(p))


class _NoGradient(torch.autograd.Function):
    """``value`` as a function of x to which it passes no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def p_norm(call: LocalCall, x: Tensor, p: float, gone: tuple[int, ...], axes: Axes) -> Tensor:
    """Returns the p-norm over the reduced dims (kept) of all ranks, shared. Gradients at 0 as
    torch's: 0."""
    if math.isinf(p):
        return best_of(call, x.abs(), gone, p > 0, axes)
    if p == 0:
        counts = call.collectives.psum((x != 0).sum(gone, True).to(x.dtype), axes)
        return _NoGradient.apply(x, counts)
    return root(call.collectives.psum(powers(x, p).sum(gone, True), axes), p)


def _norm(input: Arg, p: Any, dim: Any, keepdim: bool, dtype: Any) -> Factors:
    gone = reduced_dims(input, dim)
    if input.dtype is not None and not input.dtype.is_floating_point:
        raise NoRule("norm of a tensor that is not real")
    if not isinstance(p, (int, float)) or (p < 0 and not math.isinf(p)):
        raise NoRule(f"norm of order {p!r}")
    if math.isinf(p) and any(input.shape[d] == 0 for d in gone):
        raise NoRule("the largest of nothing")

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
        to = dtype or x.dtype
        size = p_norm(call, widened(x.to(to)), p, gone, axes)
        return size.reshape(call.outputs[0].local_shape).to(to)

    return reduction(input, dim, keepdim, "inner", local=inner(gone, reduce))


def _order(func: Any, input: Arg, ord: Any, dim: Any) -> Any:
    """Returns the order of the norm of vectors that a call computes."""
    if func is torch.norm:
        return 2.0 if ord in ("fro", None) else ord
    if func is torch.linalg.norm:
        dims = len(reduced_dims(input, dim)) if dim is not None else input.ndim
        if ord is None or (dims == 2 and ord == "fro"):
            return 2.0
        if dims != 1:
            raise NoRule(f"matrix norm of order {ord!r}")
    return ord


def _vector_norm(func: Any, default: Any, doc: str) -> None:
    """Registers a norm of vectors. ``default``: the order if none is given."""

    @rule(func, floats=True, doc=doc)
    def factors(
        input: Arg, ord: Any = default, dim: Any = None, keepdim: bool = False, out: Any = None,
        dtype: Any = None,
    ) -> Factors:  # fmt: skip
        if isinstance(out, torch.dtype):  # Tensor.norm(p, dim, keepdim, dtype) has no out
            dtype = out
        return _norm(input, _order(func, input, ord, dim), dim, keepdim, dtype)


_vector_norm(torch.linalg.vector_norm, 2, "reduced inside, for every order")
_vector_norm(torch.norm, "fro", 'reduced inside, for every order of vectors and for "fro"')
_MATRICES = "norms of vectors, and the Frobenius norm; other norms of matrices have no rule"
_vector_norm(torch.linalg.norm, None, _MATRICES)


@rule(torch.linalg.matrix_norm)
def matrix_norm(
    A: Arg, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None,
    out: None = None,
) -> Factors:  # fmt: skip
    """the Frobenius norm is reduced; for the others matrices are whole"""
    if ord != "fro":
        dims, sizes = without(A, fronts(dim, A.ndim)), dict[Any, int](enumerate(A.shape))
        left = dims if keepdim else tuple(d for d in dims if d is not None)
        return Factors((dims,), (left,), sizes, local=zeros_if_empty)
    return _norm(A, 2.0, dim, keepdim, dtype)


@rule(F.normalize, floats=True)
def normalize(
    input: Arg, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Factors:
    """x / max(norm, eps): pass-through; the norm over a split dim is reduced inside"""
    _norm(input, p, dim, True, None)  # raises the same errors
    gone = reduced_dims(input, dim)

    def reduce(call: LocalCall, axes: Axes, x: Tensor, *_: Any, **__: Any) -> Tensor:
        size = p_norm(call, widened(x), p, gone, axes).to(x.dtype)
        return x / call.collectives.pvary(size.clamp_min(eps), axes)

    return pointwise_factors([input], local=inner(gone, reduce))


# var and std --------------------------------------------------------------------------------------


class _Moments(torch.autograd.Function):
    """(variance, mean) as functions of x. ``dof``: the degrees of freedom, ``whole``: all dims are
    reduced."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, var: Tensor, mean: Tensor, rest: Tensor, call: LocalCall,
        gone: tuple[int, ...], axes: Axes, n: int, dof: float, whole: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(x, mean, rest)
        ctx.with_ = call.collectives, gone, axes, n, dof, whole
        ctx.set_materialize_grads(False)
        return var.clone(), mean.clone()

    @staticmethod
    def backward(ctx: Any, of_var: Tensor | None, of_mean: Tensor | None) -> Any:
        x, mean, rest = ctx.saved_tensors
        collectives, gone, axes, n, dof, whole = ctx.with_
        grad = None if of_mean is None else collectives.pvary(of_mean / n, axes).expand_as(x)
        if of_var is None:  # 0 * inf would be NaN
            return grad, *[None] * 9
        if torch.is_grad_enabled():  # the gradient will be differentiated
            mean = collectives.psum(x.sum(gone, True), axes) / n
            rest = torch.zeros_like(rest)
        far = x - collectives.pvary(mean, axes) - rest
        if whole and dof <= 0:  # as torch, which follows NumPy
            far = torch.where(x == collectives.pvary(mean, axes) + rest, torch.nan, torch.inf)
        else:
            far = far * (2 / dof if dof else torch.inf)
        far = collectives.pvary(of_var, axes) * far
        return far if grad is None else far + grad, *[None] * 9


def _last(piece: LocalShardInfo, x: Tensor, gone: tuple[int, ...]) -> Tensor:
    """Returns a view of the last element of each slice; of no element on ranks that lack it."""
    for d in gone:
        end = piece.local_box.offset[d] + piece.local_shape[d]
        x = x.narrow(d, max(x.shape[d] - 1, 0), min(x.shape[d], int(end == piece.shape[d])))
    return x


def moments(
    call: LocalCall, x: Tensor, gone: tuple[int, ...], axes: Axes, n: int, correction: float,
    whole: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (variance, mean, rest, early) over all ranks, reduced dims kept, shared. ``n``:
    elements in all; ``rest``: what the rounding of the mean has lost, without a gradient;
    ``early``: mask of the slices in which an element before the last is not finite."""
    data, reduce, dof = x.detach(), call.collectives.all_reduce, n - correction
    mean = reduce(data.sum(gone, True), "sum", axes) / n
    far = data - mean
    squares = far.square().sum(gone, True)
    _last(call.inputs[0], far, gone).nan_to_num_(0.0, 0.0, 0.0)
    squares, rest = reduce(torch.stack([squares, far.sum(gone, True)]), "sum", axes).unbind(0)
    early = rest.isnan()  # an infinite element minus the mean
    rest = (rest / n).masked_fill(squares.isfinite().logical_not(), 0)
    var = (squares - rest.square() * n) / max(dof, 0)
    if x.requires_grad:
        var, mean = _Moments.apply(x, var, mean, rest, call, gone, axes, n, dof, whole)
    return var, mean, rest, early


def _options(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, float]:
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
        dim, less = _options(dim, unbiased, correction)
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
                var, mean, rest, early = moments(call, x.double(), gone, axes, n, less, dim is None)
                mean = mean + rest.masked_fill(early, torch.nan)  # as torch's running mean
                first = (root(var) if rooted else var).reshape(shape).to(x.dtype)
                return (first, mean.reshape(shape).to(x.dtype)) if with_mean else first

            return moment

        return reduction(input, dim, keepdim, "inner", 1 + with_mean, local=local)


_moment(torch.var, rooted=False, with_mean=False)
_moment(torch.std, rooted=True, with_mean=False)
_moment(torch.var_mean, rooted=False, with_mean=True)
_moment(torch.std_mean, rooted=True, with_mean=True)
