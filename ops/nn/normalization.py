"""Normalizations: normalized dims stay whole, all others pass through; batch_norm reduces over
ranks inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from disttensor.core.layout import Axes
from ops.dims import SECOND, shaped, tensors_in, without
from ops.dtypes import widened
from ops.empty_pieces import padded_if_empty
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import LocalCall
from ops.reduction.norm_var import moments
from ops.reduction.sum import sizes_of
from ops.registry import rule

Tensor = torch.Tensor


def _last_dims(*funcs: Any) -> None:
    @rule(*funcs, doc="the last dims stay whole")
    def factors(input: Arg, normalized_shape: Any, *more: Any, **words: Any) -> Factors:
        shape = normalized_shape
        wanted = (shape,) if isinstance(shape, int) else tuple(shape)
        n = len(wanted)
        last = tuple(range(input.ndim - n, input.ndim))
        f = pointwise_factors([input], unsplittable=set(last), local=padded_if_empty)
        return f.replace(inputs=(*f.inputs, *(last for _ in tensors_in(*more, *words.values()))))


_last_dims(F.layer_norm, torch.layer_norm)
_last_dims(F.rms_norm, torch.rms_norm)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    input: Arg, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Factors:  # fmt: skip
    """batch and whole groups may be split; the rest of the channels and all that follows stay
    whole"""
    channels = input.shape[1]
    dims = ("n", ("g", "c"), *range(input.ndim - 2))
    sizes: dict[Any, int] = {"g": num_groups, "c": channels // num_groups}
    inputs = (dims, *((("g", "c"),) for o in (weight, bias) if isinstance(o, Arg)))

    def local(call: LocalCall) -> Any:
        run, parts = padded_if_empty(call), call.count(call.axes("g"))
        if parts == 1:
            return run

        def group_norm(x: Tensor, groups: int, *args: Any, **kwargs: Any) -> Tensor:
            return run(x, groups // parts, *args, **kwargs)

        return group_norm

    return Factors(
        inputs, (dims,), sizes, unsplittable=set(dims[2:]), divisible_only={"g"}, local=local
    )


@rule(F.instance_norm)
def instance_norm(
    input: Arg, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Factors:  # fmt: skip
    """batch and channels pass through, not a batch whose mean is written; the rest stays whole"""
    if input.ndim < 3:
        raise NoRule("instance_norm of a single image")
    stats = tensors_in(running_mean, running_var)
    written = _written_stats(stats) if use_input_stats else set[int]()
    whole = {*range(2, input.ndim), *([0] if written else [])}
    local = partial(_of_a_dense_gradient, padded_if_empty)
    f = pointwise_factors([input], unsplittable=whole, local=local)
    rest = ((1,) for _ in (*stats, *tensors_in(weight, bias)))
    return f.replace(inputs=(*f.inputs, *rest), side_writes=written)


@rule(F.batch_norm)
def batch_norm(
    input: Arg, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Factors:  # fmt: skip
    """per channel; in training by the whole batch, reduced inside: running statistics stay put"""
    dims = tuple(range(input.ndim))
    rest = [o for o in (running_mean, running_var, weight, bias) if isinstance(o, Arg)]
    inputs = (dims, *((1,) for _ in rest))
    mixed = len({o.dtype for o in rest}) > 1
    whole_batch = _of_one_dtype if mixed else padded_if_empty
    if not training:
        return Factors(inputs, (dims,), local=partial(_of_a_dense_gradient, whole_batch))
    if math.prod(input.shape[d] for d in dims if d != 1) == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{torch.Size(input.shape)}"
        )
    written = _written_stats(tensors_in(running_mean, running_var))
    gone = tuple(d for d in dims if d != 1)

    def local(call: LocalCall) -> Any:
        axes = tuple(sorted(call.axes(*gone)))
        return _batch_norm(call, gone, axes) if axes else whole_batch(call)

    return Factors(inputs, (dims,), side_writes=written, local=local)


def _written_stats(stats: list[Arg]) -> set[int]:
    """Returns the numbers of running statistics, which follow the input, as inputs of a call that
    writes to them."""
    if any(o.layout.partial for o in stats) or len({o.layout for o in stats}) > 1:
        raise NoRule("running statistics to be written that are pending, or lie apart")
    return set(range(1, 1 + len(stats)))


def _of_a_dense_gradient(make: Callable[[LocalCall], Any], call: LocalCall) -> Any:
    """Returns the function of ``make`` with a dense gradient of its result. If the batch is one
    image, torch (up to 2.15, on CPU) takes a gradient with other strides, as of a transpose, for
    another memory format, and returns wrong gradients. A piece may be one image, and instance_norm
    merges all images to one."""
    run = make(call)
    if call.func is F.batch_norm and call.inputs[0].local_shape[0] != 1:
        return run

    def dense(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(Tensor.contiguous)
        return out

    return dense


def _of_one_dtype(call: LocalCall) -> Any:
    """Returns the torch function, called with weight and bias in the dtype of the statistics, for
    any dtype of the input."""
    run = padded_if_empty(call)

    def batch_norm(
        input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        dtype = input.dtype if running_mean is None else running_mean.dtype
        weight, bias = (t if t is None else t.to(dtype) for t in (weight, bias))
        return run(input, running_mean, running_var, weight, bias, *args, **kwargs)

    return batch_norm


def _batch_norm(call: LocalCall, gone: tuple[int, ...], axes: Axes) -> Any:
    n = sizes_of(call, gone)[1]

    def batch_norm(
        input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        x = widened(input)
        if not n:  # the statistics do not change
            running_mean = running_var = None
        var, mean, rest, _ = moments(call, x, gone, axes, n, 0)
        along = mean.shape
        if running_mean is not None:
            center = (mean.detach() + rest).view(-1)
            running_mean.lerp_(center.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = var.detach().view(-1) * (n / max(n - 1, 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        far = x - call.collectives.pvary(mean, axes) - rest
        out = far * call.collectives.pvary((var + eps).rsqrt(), axes)
        if weight is not None:
            out = out * weight.view(along)
        if bias is not None:
            out = out + bias.view(along)
        return out.to(input.dtype)

    return batch_norm


@rule(torch._weight_norm, exact=True)
def weight_norm(v: Arg, g: Arg, dim: int = 0) -> Factors:
    """the dim passes through: each of its slices has a norm, and is whole; linear in g"""
    if dim < 0 or g.ndim != v.ndim:
        raise NoRule("one norm of the whole")
    ins = [without(t, set(range(v.ndim)) - {dim}) for t in (v, g)]
    return Factors(
        tuple(ins), (ins[0],), linear_terms=SECOND, shapes=(v.shape,), local=padded_if_empty
    )


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
