"""Random numbers of a distribution, from the bits of a ``philox.Source``.

Each function draws the source's box. Numbers are computed in float64 and rounded to ``dtype``
(uniform: from the leading bits), so that a float32 model starts as the float64 model does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from disttensor.core.layout import Box
from disttensor.random.philox import M32, Device, Source
from disttensor.random.reproducible_math import log, normal_quantile, sin_half_pi
from disttensor.torch_private import no_dispatch

_HALVES = (torch.float16, torch.bfloat16)


def uniform(source: Source, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draws from [low, high), with bounds rounded to ``dtype``; float64 from 53 bits, others 24.

    Never ``high`` itself: a number that rounds up to it becomes the value below. Complex: both
    parts.
    """
    if dtype.is_complex:
        return torch.view_as_complex(uniform(source.pairs(), _part(dtype), low, high))
    _need_floating("uniform", dtype)
    with no_dispatch():
        edges = torch.tensor([low, high], dtype=torch.float64, device="cpu").to(dtype)
        top = torch.nextafter(edges[1], edges[0]).item()
        first, last = edges.tolist()
    if not (first <= last and math.isfinite(last - first)):
        raise ValueError(
            f"uniform: low={low}, high={high} in {dtype}: need low <= high, both finite"
        )
    digits = 53 if dtype == torch.float64 else 24
    if (first, last) == (0.0, 1.0) and dtype not in _HALVES:
        return _draw(source, dtype, lambda a, b, *_: _unit(a, b, digits))
    return _draw(
        source, dtype, lambda a, b, *_: _unit(a, b, digits).mul_(last - first).add_(first)
    ).clamp_(max=top)


def normal(source: Source, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Draws normal numbers; |value - mean| < 8.6 std.

    Complex: each part has the mean ``mean`` and std / sqrt(2), as in torch.
    """
    if dtype.is_complex:
        pairs = normal(source.pairs(), _part(dtype), mean, std * math.sqrt(0.5))
        return torch.view_as_complex(pairs)
    _need_floating("normal", dtype)
    if not std >= 0.0:
        raise ValueError(f"normal: std={std}: a standard deviation is 0 or more")
    return _draw(source, dtype, lambda *lanes: _standard(*lanes).mul_(std).add_(mean))


def truncated_normal(
    source: Source, dtype: torch.dtype,
    mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0,
) -> Tensor:  # fmt: skip
    """Draws normal numbers in [low, high], by the quantile of a uniform number."""
    check_truncated_normal(dtype, std, low, high)
    z_low, z_high = (low - mean) / std, (high - mean) / std
    mirrored = z_low > 0.0  # Phi is fine-grained in its lower tail only
    if mirrored:
        z_low, z_high = -z_high, -z_low
    p_low, p_high = (0.5 * math.erfc(-z * math.sqrt(0.5)) for z in (z_low, z_high))

    def number(a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        z = normal_quantile(_open_unit(a, b).mul_(p_high - p_low).add_(p_low))
        return z.mul_(-std if mirrored else std).add_(mean).clamp_(low, high)

    return _draw(source, dtype, number)


def check_truncated_normal(dtype: torch.dtype, std: float, low: float, high: float) -> None:
    """Raises an error if ``truncated_normal`` cannot draw such numbers."""
    _need_floating("truncated_normal", dtype)
    if not (low <= high and std > 0.0):
        raise ValueError(
            f"truncated_normal: low={low}, high={high}, std={std}: need low <= high, std > 0"
        )


def exponential(source: Source, dtype: torch.dtype, rate: float = 1.0) -> Tensor:
    """Draws -log(u) / rate, always positive: 0 becomes the smallest number above."""
    _need_floating("exponential", dtype)
    if not rate > 0.0:
        raise ValueError(f"exponential: rate={rate}: need a positive rate")
    out = _draw(source, dtype, lambda a, b, *_: log(_open_unit(a, b)).div_(-rate))
    limits = torch.finfo(dtype)
    return out.clamp_(min=limits.tiny * limits.eps)


def bernoulli(source: Source, dtype: torch.dtype, p: float | Tensor = 0.5) -> Tensor:
    """Draws 1 with probability ``p`` (a number, or a tensor of this piece's shape), else 0.

    53 bits are compared: p = 0 never gives 1, p = 1 always.
    """
    if not isinstance(p, Tensor):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"bernoulli: p={p} is no probability: need 0 <= p <= 1")
        return _draw(source, dtype, lambda a, b, *_: _unit(a, b) < p)
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise RuntimeError("bernoulli: Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    piece = tuple(source.box.shape)
    if p.shape != piece:
        raise ValueError(
            f"bernoulli: p has shape {tuple(p.shape)}, this piece has {piece}: "
            "pass the probabilities of this piece"
        )
    odds, out = p.detach().reshape(-1), source.empty(dtype)
    for where, (a, b, _, _) in source.lanes():
        out.view(-1)[where] = (_unit(a, b) < odds[where].to(torch.float64)).to(dtype)
    return out


def integers(source: Source, dtype: torch.dtype, low: int = 0, high: int = 2) -> Tensor:
    """Draws integers in [low, high), of any range that int64 can hold, as ``dtype``.

    floor(r n / 2^128) with r the four lanes and n = high - low: each value's probability is within
    2^-128 of 1/n, where a 64-bit modulo is off by up to 2^-64.
    """
    if not -(1 << 63) <= low < high <= 1 << 63:
        raise ValueError(f"integers: low={low}, high={high}: need low < high, both within int64")
    n = high - low
    limbs = [n >> shift & M32 for shift in (0, 32, 64) if n >> shift]

    def number(*lanes: Tensor) -> Tensor:
        r = lanes[::-1]  # least significant first
        product = [torch.zeros_like(r[0]) for _ in range(len(r) + len(limbs))]
        for j, limb in enumerate(limbs):  # uint64 in int64: limb * word + two words never overflows
            carry = torch.zeros_like(r[0])
            for i, word in enumerate(r):
                term = (word * limb).add_(product[i + j]).add_(carry)
                product[i + j] = term & M32
                carry = term.bitwise_right_shift_(32).bitwise_and_(M32)
            product[j + len(r)] = carry
        value = product[4] if len(limbs) == 1 else product[4] | product[5] << 32
        return value + low

    return _draw(source, dtype, number)


def permutation(seed: int, call: int, n: int, device: Device) -> Tensor:
    """Draws a permutation of range(n), int64, whole on every rank: the order of n 64-bit keys.

    Equal keys (probability about n^2 / 2^65) keep their order.
    """
    source = Source(seed, call, (n,), Box((0,), (n,)), device)
    keys = _draw(source, torch.int64, lambda a, b, *_: (a << 32).bitwise_or_(b))
    return torch.argsort(keys, stable=True)


# Lanes to numbers ---------------------------------------------------------------------------------


def _draw(source: Source, dtype: torch.dtype, number: Callable[..., Tensor]) -> Tensor:
    """Computes ``number`` of the four lanes for every element; float64 is rounded to half types by
    way of float32, on every device."""
    out = source.empty(dtype)
    for where, lanes in source.lanes():
        value = number(*lanes)
        if dtype in _HALVES and value.dtype == torch.float64:
            value = value.to(torch.float32)
        out.view(-1)[where] = value
    return out


def _unit(high: Tensor, low: Tensor, digits: int = 53) -> Tensor:
    """Returns [0, 1) in float64 from the ``digits`` (up to 53) leading bits of the two lanes."""
    if digits <= 32:
        return (high >> (32 - digits)).to(torch.float64).mul_(2.0**-digits)
    word = (high << (digits - 32)).bitwise_or_(low >> (64 - digits))
    return word.to(torch.float64).mul_(2.0**-digits)


def _open_unit(high: Tensor, low: Tensor) -> Tensor:
    """Returns (0, 1) in float64, symmetric about 1/2: the odd multiples of 2^-53."""
    word = (high << 21).bitwise_or_(low >> 11).bitwise_or_(1)
    return word.to(torch.float64).mul_(2.0**-53)


def _standard(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Returns standard normal numbers in float64.

    Box-Muller, sqrt(-2 log u) sin(pi/2 t) with u in (0, 1), t in (-1, 1): the sine of a uniform
    angle in a half circle has the law of the cosine on the whole.
    """
    radius = log(_open_unit(a, b)).mul_(-2.0).sqrt_()
    return sin_half_pi(_open_unit(c, d).mul_(2.0).sub_(1.0)).mul_(radius)


def _part(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the parts of complex numbers."""
    return torch.float64 if dtype == torch.complex128 else torch.float32


def _need_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(
            f"{name}: {dtype} cannot hold its values; use a floating dtype, "
            "or integers() or bernoulli()"
        )
