"""Convolutions: batch and output channels pass through, input channels are reduced, groups stay
together.

Dims that the window slides over stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops.call import Call
from ops.empty import is_empty, or_zeros
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.registry import rule

Tensor = torch.Tensor


def tuple_of(value: Any, n: int) -> tuple[int, ...]:
    """A number or a list of one as n numbers."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * (n if len(value) == 1 else 1)


def _forward_sizes(
    sizes: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...]:
    n = len(sizes)
    steps, holes = tuple_of(stride, n), tuple_of(dilation, n)
    reach = [d * (k - 1) for d, k in zip(holes, kernel, strict=True)]
    if padding == "same":
        return tuple(sizes)
    pads = (0,) * n if padding == "valid" else tuple_of(padding, n)
    return tuple(
        (size + 2 * p - r - 1) // s + 1
        for size, p, r, s in zip(sizes, pads, reach, steps, strict=True)
    )


def _transposed_sizes(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Any,
    padding: Any,
    extra: Any,
    dilation: Any,
) -> tuple[int, ...]:
    n = len(sizes)
    options = [tuple_of(v, n) for v in (stride, padding, extra, dilation)]
    return tuple(
        (size - 1) * s - 2 * p + d * (k - 1) + e + 1
        for size, k, s, p, e, d in zip(sizes, kernel, *options, strict=True)
    )


def _factors(
    name: str, n: int, input: Arg, weight: Arg, bias: Any, groups: int, out: tuple[int, ...],
    transposed: bool, local: Any,
) -> Factors:  # fmt: skip
    lead: tuple[Any, ...] = ("n",) * (input.ndim - n - 1)
    slide = tuple(f"in{i}" for i in range(n))
    taps = tuple(f"k{i}" for i in range(n))
    made = tuple(f"out{i}" for i in range(n))
    into, outof = ("c", "o") if groups == 1 else (("g", "c"), ("g", "o"))
    if transposed:
        weights: tuple[Any, ...] = (into, "o", *taps)
        c, o = weight.shape[0] // groups, weight.shape[1]
    else:
        weights = (outof, "c", *taps)
        c, o = weight.shape[1], weight.shape[0] // groups
    if input.shape[len(lead)] != c * groups or min(out, default=1) < 1:
        raise NoRule(
            f"{name}: input {list(input.shape)} and weight {list(weight.shape)} do not fit"
        )
    sizes: dict[Any, int] = {"g": groups, "c": c, "o": o}
    for names, values in (
        (lead, input.shape), (slide, input.shape[-n:]), (taps, weight.shape[2:]), (made, out)
    ):  # fmt: skip
        sizes.update(zip(names, values, strict=False))
    inputs: list[tuple[Any, ...]] = [(*lead, into, *slide), weights]
    terms = [frozenset({0, 1})]
    if isinstance(bias, Arg):
        inputs.append((outof,))
        terms.append(frozenset({2}))
    return Factors(
        tuple(inputs), ((*lead, outof, *made),), sizes, terms=tuple(terms), local=local,
        reduced={"c": "sum"} if groups == 1 else {}, even=frozenset({"g"}),
        whole=frozenset((*slide, *taps)),
    )  # fmt: skip


def _check(name: str, n: int, input: Arg, weight: Arg) -> None:
    if input.ndim not in (n + 1, n + 2) or weight.ndim != n + 2:
        raise NoRule(f"{name} of {list(input.shape)} with {list(weight.shape)}")


def _conv(func: Any, n: int) -> None:
    name = func.__name__

    def factors(
        input: Arg, weight: Arg, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Factors:  # fmt: skip
        _check(name, n, input, weight)

        def local(call: Call) -> Any:
            parts = call.count(call.axes("g"))
            if is_empty(call):
                return or_zeros(call, bias_dim=-n - 1)
            if parts == 1:
                return call.func

            def conv(
                input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
                dilation: Any = 1, groups: int = 1,
            ) -> Tensor:  # fmt: skip
                return func(input, weight, bias, stride, padding, dilation, groups // parts)

            return conv

        out = _forward_sizes(input.shape[-n:], weight.shape[2:], stride, padding, dilation)
        return _factors(name, n, input, weight, bias, groups, out, False, local)

    factors.__name__, factors.__doc__ = name, "input channels: P(sum); groups stay together"
    rule(func)(factors)


def _conv_transpose(func: Any, n: int) -> None:
    name = func.__name__

    def factors(
        input: Arg, weight: Arg, bias: Any = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Factors:  # fmt: skip
        _check(name, n, input, weight)

        def local(call: Call) -> Any:
            parts = call.count(call.axes("g"))
            if is_empty(call):
                return or_zeros(call, bias_dim=-n - 1)
            if parts == 1:
                return call.func

            def conv(
                input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
                output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
            ) -> Tensor:  # fmt: skip
                fewer = groups // parts
                return func(input, weight, bias, stride, padding, output_padding, fewer, dilation)

            return conv

        out = _transposed_sizes(
            input.shape[-n:], weight.shape[2:], stride, padding, output_padding, dilation
        )
        return _factors(name, n, input, weight, bias, groups, out, True, local)

    factors.__name__, factors.__doc__ = name, "input channels: P(sum); groups stay together"
    rule(func)(factors)


_conv(torch.conv1d, 1)
_conv(torch.conv2d, 2)
_conv(torch.conv3d, 3)
_conv_transpose(torch.conv_transpose1d, 1)
_conv_transpose(torch.conv_transpose2d, 2)
_conv_transpose(torch.conv_transpose3d, 3)
