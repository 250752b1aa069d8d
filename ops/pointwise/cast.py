"""Copies and casts: the same elements, perhaps in another dtype; and functions that fill a tensor.

A cast is linear if both dtypes are floating (``ops/promotion.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ops.dims import FIRST, SECOND
from ops.dtypes import smooth
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.pointwise.elementwise import register_names
from ops.registry import Rule, rule

ALIASES = "positive resolve_conj resolve_neg cpu cuda pin_memory __pos__"
PARTS = "real imag conj"
DTYPES = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "cfloat": torch.complex64, "cdouble": torch.complex128,
    "chalf": torch.complex32, "bool": torch.bool, "byte": torch.uint8, "char": torch.int8,
    "short": torch.int16, "int": torch.int32, "long": torch.int64,
}  # fmt: skip


def cast(input: Arg, dtype: Any) -> Factors:
    """elementwise; any Partial passes where the dtype stays, a sum where both are floating"""
    if dtype is None or dtype == (input.dtype or torch.float32):
        return alias(input)
    # tensors without data do not move to another device, so torch is not asked
    linear = smooth(input.dtype) and smooth(dtype)
    return pointwise_factors([input], linear_terms=FIRST if linear else ())


def alias(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """elementwise; any Partial passes; may share memory"""
    return pointwise_factors([input], linear_terms=FIRST, moves=True)


def part_of_complex(input: Arg, **kwargs: Any) -> Factors:
    """elementwise; linear; shares memory"""
    return pointwise_factors([input], linear_terms=FIRST)


register_names(ALIASES, Rule("alias", alias, pattern="elementwise, any Partial passes"))
register_names(
    PARTS, Rule("part_of_complex", part_of_complex, pattern="elementwise, linear, a view")
)
for _part in (torch.Tensor.real, torch.Tensor.imag):
    rule(_part.__get__, exact=True)(part_of_complex)  # type: ignore[attr-defined]


def cast_to(dtype: torch.dtype) -> Callable[..., Factors]:
    def factors(input: Arg, memory_format: Any = None) -> Factors:
        return cast(input, dtype)

    return factors


for _name, _dtype in DTYPES.items():
    _enter = rule(
        getattr(torch.Tensor, _name), exact=True, doc="elementwise; linear between floating dtypes"
    )
    _enter(cast_to(_dtype))


@rule(torch.Tensor.to, torch.Tensor.type_as, exact=True)
def to(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """to(dtype), to(device), to(device, dtype), to(other): elementwise"""
    values = (*args, *kwargs.values())
    other = next((v for v in values if isinstance(v, Arg)), None)
    if other is None:
        return cast(input, next((v for v in values if isinstance(v, torch.dtype)), None))
    f = cast(input, other.dtype or torch.float32)
    inputs = (*f.inputs, (None,) * other.ndim)
    return f.replace(inputs=inputs, metadata_only={1}, moves=False)


@rule(torch.Tensor.type, exact=True)
def type_(input: Arg, dtype: Any = None, non_blocking: bool = False) -> Factors:
    """type(dtype): a cast; the dtype may have an old name (torch.FloatTensor)"""
    if dtype is None:
        raise NoRule("type() is a string")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.rsplit(".", 1)[-1])
    return cast(input, dtype if isinstance(dtype, torch.dtype) else dtype.dtype)


@rule(torch.view_as_real)
def view_as_real(input: Arg) -> Factors:
    """... -> ... 2"""
    dims = tuple(range(input.ndim))
    out = (*dims, "two")
    return Factors((dims,), (out,), {"two": 2}, {}, {"two"}, linear_terms=FIRST)


@rule(torch.view_as_complex)
def view_as_complex(input: Arg) -> Factors:
    """... 2 -> ...; as of view, a local whose strides do not allow it is copied, with a warning"""
    dims = tuple(range(input.ndim))
    return Factors((dims,), (dims[:-1],), linear_terms=FIRST, local=_pairs)


def _pairs(call: Any) -> Any:
    def view(input: torch.Tensor) -> torch.Tensor:
        try:
            return torch.view_as_complex(input)
        except RuntimeError:
            if input.numel() and input.is_floating_point():
                warnings.warn(
                    f"view_as_complex: a local of strides {input.stride()} and offset "
                    f"{input.storage_offset()} is copied; writes in place through the result do "
                    "not reach what it was taken from",
                    stacklevel=2,
                )
            return torch.view_as_complex(input.clone(memory_format=torch.contiguous_format))

    return view


@rule(torch.Tensor.copy_)
def copy_(input: Arg, src: Any, non_blocking: bool = False) -> Factors:
    """the target is only written; linear in the source"""
    if not isinstance(src, Arg):
        return fill_(input, src)
    return pointwise_factors([input, src], linear_terms=SECOND, metadata_only={0})


@rule(torch.zero_)
def zero_(input: Arg) -> Factors:
    """the target is only written; zero is zero in every piece, whatever is pending"""
    return pointwise_factors([input], linear_terms=FIRST, moves=True)


@rule(torch.fill_, integers=False)
def fill_(input: Arg, value: Any) -> Factors:
    """the target is only written; of a pending sum the first rank has the value, the others zero"""
    if isinstance(value, Arg):
        return copy_(input, value)

    def local(call: Any) -> Any:
        pending = tuple(a for a, op in call.outputs[0].layout.partial if op == "sum")
        return torch.fill_ if call.first(pending) else lambda input, value: input.zero_()

    return pointwise_factors([input], linear_terms=FIRST, local=local)


@rule(torch.fill, exact=True, integers=False)
def fill(input: Arg, value: Any) -> Factors:
    """elementwise; only the input's shape matters"""
    tensors = [input, value] if isinstance(value, Arg) else [input]
    return pointwise_factors(tensors, metadata_only={0})
