"""log, sin and the normal quantile, with the same bits on every machine.

Promised: equal float64 inputs give equal bits, whatever the length of the tensor, the CPU or GPU
and the number of threads; the error is about 1 ulp. torch's own functions do not promise this: the
vectorised body and the tail of one tensor may differ in the last bit (measured: float32 sigmoid),
and then a shard would differ from the same piece of the whole. Here everything is made of
``+ - * / sqrt``, which IEEE 754 rounds in one way. Each is one torch kernel, so no compiler can
fuse two of them. All functions work elementwise and return a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ONE = 0x3FF0000000000000  # the bits of 1.0
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
_MANTISSA = (1 << 52) - 1
_LN2 = 0.6931471805599453
_ATANH = [2.0 / (2 * k + 1) for k in range(10)]


def _sine_series() -> list[float]:
    """Returns Taylor coefficients of sin(pi/2 t) / t in t^2, by products only (pow may vary)."""
    half_pi = math.pi / 2
    out = [half_pi]
    for k in range(1, 11):
        out.append(-out[-1] * half_pi * half_pi / (2 * k * (2 * k + 1)))
    return out


_SINE = _sine_series()

# Wichura, Algorithm AS 241 (PPND16), 1988: numerator and denominator, lowest power first.
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
_NEAR = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Returns sum c[k] x^k by Horner: one multiplication and one addition per term, never fused."""
    acc = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        acc.mul_(x).add_(c)
    return acc


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of positive normal float64, to about 1 ulp.

    x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1).
    """
    shifted = x.view(torch.int64) + (_ONE - _SQRT_HALF)
    m = shifted.bitwise_and(_MANTISSA).add_(_SQRT_HALF).view(torch.float64)
    e = shifted.bitwise_right_shift_(52).sub_(1023).to(torch.float64)
    s = (m - 1.0).div_(m.add_(1.0))
    return polynomial(s * s, _ATANH).mul_(s).add_(e.mul_(_LN2))


def sin_half_pi(t: Tensor) -> Tensor:
    """Returns sin(pi/2 t) for t in [-1, 1], to about 1 ulp."""
    return polynomial(t * t, _SINE).mul_(t)


def normal_quantile(p: Tensor) -> Tensor:
    """Returns z with Phi(z) = p, for p in (0, 1), to about 1e-15 relative. Source: AS 241."""
    q = p - 0.5
    r = (q * q).neg_().add_(0.180625)
    centre = polynomial(r, _CENTRE[0]).mul_(q).div_(polynomial(r, _CENTRE[1]))
    tail = torch.minimum(p, 1.0 - p).clamp_(min=2.3e-308)
    r = log(tail).neg_().sqrt_()
    near, far = r - 1.6, r - 5.0
    near = polynomial(near, _NEAR[0]).div_(polynomial(near, _NEAR[1]))
    far = polynomial(far, _FAR[0]).div_(polynomial(far, _FAR[1]))
    outer = torch.where(r <= 5.0, near, far)
    outer = torch.where(q < 0.0, -outer, outer)
    return torch.where(q.abs() <= 0.425, centre, outer)
