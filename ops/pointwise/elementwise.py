"""Elementwise functions: every dim is a factor of its own, and none is reduced.

The tables list the arguments through which a Partial may pass; in other arguments it is reduced
first. P(max) and the like never pass (-max(x) is not max(-x)).

Functions are registered by name: each function of torch with this name, in-place forms included,
gets the rule. A function with an ``inplace`` argument (F.relu) has no rule for inplace=True:
torch's own code then calls the in-place form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from disttensor.torch_private import nn_functions
from ops.dims import tensors_in
from ops.factors import Arg, Factors, NoRule, Terms, pointwise_factors
from ops.registry import RULES, Function, Rule, functions_named, register, rule

# Linear in the first tensor; in both operands together (with a number the function is affine, and a
# Partial is reduced first); in each of them; in the dividend of a number, unless the quotient is
# rounded. A tensor may hold zeros, and the addends of a sum may be zero or of two signs where their
# sum is not: a Partial is reduced before a tensor divides it
LINEAR_IN_FIRST = "neg negative deg2rad rad2deg conj_physical ldexp"
SUMS = "add sub subtract rsub complex __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__"
PRODUCTS = "mul multiply __mul__ __rmul__ __imul__"
QUOTIENTS = "div divide true_divide __truediv__ __itruediv__ __div__ __idiv__"

# Linear in nothing
UNARY = """
abs absolute acos arccos acosh arccosh angle asin arcsin asinh arcsinh atan arctan atanh arctanh
ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf
isposinf isreal lgamma log log10 log1p log2 logit nan_to_num reciprocal round rsqrt sgn sigmoid sign
signbit sin sinc sinh sqrt square tan tanh trunc airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
entr erfcx expit gammaln i0e i1 i1e log_ndtr modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 ndtr ndtri psi scaled_modified_bessel_k0
scaled_modified_bessel_k1 spherical_bessel_j0 clamp clamp_max clamp_min clip relu relu6 elu selu
celu gelu silu mish leaky_relu softplus softsign softshrink hardshrink hardtanh hardswish
hardsigmoid tanhshrink logsigmoid threshold _threshold __abs__ __invert__
"""
BINARY = """
arctan2 atan2 copysign floor_divide fmax fmin fmod gcd heaviside hypot igamma igammac lcm logaddexp
logaddexp2 maximum minimum nextafter polar remainder xlogy chebyshev_polynomial_t
chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w gammainc gammaincc
hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w xlog1py zeta __rdiv__ __rtruediv__ __floordiv__ __rfloordiv__
__ifloordiv__ __mod__ __rmod__ __imod__
"""
# Torch refuses some integers (a negative exponent of integers)
WITH_INTEGER = """
pow float_power __pow__ __rpow__ __ipow__ polygamma mvlgamma multigammaln
"""
COMPARISON = """
eq ne not_equal lt less le less_equal gt greater ge greater_equal isclose __eq__ __ne__ __lt__
__le__ __gt__ __ge__
"""
LOGICAL = "logical_and logical_not logical_or logical_xor"
BITWISE = """
bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor __and__
__rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__ __rlshift__
__ilshift__ __rshift__ __rrshift__ __irshift__
"""

PLACES: tuple[Any, ...] = (torch.Tensor, torch, F, torch.special, nn_functions)


def register_names(names: str, rule: Rule) -> None:
    """Registers ``rule`` for every function with one of the names that has no rule yet."""
    for name in names.split():
        for func, inplace in functions_named(name, PLACES):
            if func not in RULES:
                factors = _not_inplace(func, rule.factors)
                integers = rule.integers or factors is not rule.factors  # inplace=1
                found = replace(rule, inplace=inplace, factors=factors, integers=integers)
                register(found, func, exact=True)


def _not_inplace(func: Function, factors: Callable[..., Factors]) -> Callable[..., Factors]:
    """Returns a rule that raises NoRule if the argument ``inplace`` of the function is set."""
    if not inspect.isfunction(inspect.unwrap(func)):
        return factors  # C functions have no such argument
    names = list(inspect.signature(func).parameters)
    if "inplace" not in names:
        return factors
    at = names.index("inplace")

    def checked(*args: Any, **kwargs: Any) -> Factors:
        if kwargs.get("inplace", len(args) > at and args[at]):
            raise NoRule(f"{func.__name__}(inplace=True) is {func.__name__}_")
        return factors(*args, **kwargs)

    return checked


def each(*values: Any) -> Terms:
    """Returns a term for each value: a tensor, or the tensors of a product. No terms if a value
    holds only plain numbers."""
    members = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    terms = tuple({m.index for m in some if isinstance(m, Arg)} for some in members)
    return terms if all(terms) else ()


def joint(args: Any, kwargs: dict[str, Any]) -> Terms:
    """Returns the terms of a sum of two. torch.add(x, alpha, y) is a deprecated form."""
    return each(*args) if len(args) == 2 else ()


def quotient(args: Any, kwargs: dict[str, Any]) -> Terms:
    input, *other = args
    rounded = kwargs.get("rounding_mode") is not None
    return () if rounded or tensors_in(other) else each(input)


# How a function is linear: see the names above -> the terms of a call
LINEAR: dict[str, Callable[[Any, dict[str, Any]], Terms]] = {
    "none": lambda args, kwargs: (),
    "first": lambda args, kwargs: each(args[0]),
    "joint": joint,
    "product": lambda args, kwargs: each(args),
    "quotient": quotient,
    "interpolation": lambda args, kwargs: each(*args[:2]),
    "product and sum": lambda args, kwargs: each(args[0], args[1:]),
}


def pointwise(names: str, linear: str = "none", results: int = 1, integers: bool = False) -> None:
    """Registers elementwise functions by name; ``linear``: a key of LINEAR."""
    terms_of = LINEAR[linear]

    def factors(*args: Any, **kwargs: Any) -> Factors:
        tensors = tensors_in(*args, *kwargs.values())
        return pointwise_factors(tensors, results, linear_terms=terms_of(args, kwargs))

    pattern = f"elementwise, linear: {linear}"
    register_names(
        names, Rule("pointwise", factors, integers=integers, pattern=pattern, sizes="letters")
    )


for _names, _linear in (
    (LINEAR_IN_FIRST, "first"), (SUMS, "joint"), (PRODUCTS, "product"), (QUOTIENTS, "quotient")
):  # fmt: skip
    pointwise(_names, _linear)
for _names in (UNARY, BINARY, COMPARISON, LOGICAL, BITWISE):
    pointwise(_names)
pointwise(WITH_INTEGER, integers=True)
pointwise("addcdiv")
pointwise("addcmul", "product and sum")
pointwise("lerp", "interpolation")
pointwise("frexp", results=2)


@rule(torch.where, exact=True, integers=False)
def where(condition: Any, input: Any = None, other: Any = None) -> Factors:
    """elementwise; linear in both choices together"""
    if input is None or other is None:
        raise NoRule("where(condition) is nonzero: its shape depends on data")
    tensors = tensors_in(condition, input, other)
    return pointwise_factors(tensors, linear_terms=each(input, other))


@rule(torch.Tensor.where, exact=True, integers=False)
def tensor_where(input: Any, condition: Any, other: Any) -> Factors:
    """elementwise; linear in both choices together"""
    tensors = tensors_in(input, condition, other)
    return pointwise_factors(tensors, linear_terms=each(input, other))


@rule(torch.prelu)
def prelu(input: Arg, weight: Arg) -> Factors:
    """n c ..., c -> n c ...: a weight for each channel, or one for all"""
    dims = tuple(range(input.ndim))
    channel = 1 if input.ndim > 1 and weight.numel() > 1 else None
    return Factors((dims, (channel,) * weight.ndim), (dims,))
