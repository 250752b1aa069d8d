"""Checks arguments of public functions: the error names the argument, its value, and the expected
values.

``who`` is "function: argument". All checks run before anything is sent or changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch


def argument_error(
    who: str, value: object, expected: str, kind: type[Exception] = TypeError
) -> Exception:
    """Returns the error for an argument; for a long value it contains only the type."""
    text = " ".join(repr(value).split())
    shown = text if len(text) <= 80 else f"({type(value).__name__})"
    return kind(f"{who}={shown}: {expected} is expected")


def check_type(who: str, value: object, kinds: Any, expected: str) -> None:
    if not isinstance(value, kinds):
        raise argument_error(who, value, expected)


def check_bool(who: str, value: object) -> None:
    check_type(who, value, bool, "True or False")


def check_callable(who: str, value: object, expected: str = "a function") -> None:
    if not callable(value):
        raise argument_error(who, value, expected)


def check_sequence(who: str, value: object, expected: str) -> tuple[Any, ...]:
    """Returns the entries of an iterable that is not text."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise argument_error(who, value, expected)
    return tuple(value)


def is_int(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_int(
    who: str, value: Any, least: int | None = None, expected: str = "a whole number"
) -> int:
    """Returns ``value`` as an int. Raises an error unless it is a whole number >= ``least``."""
    if least is not None:
        expected += f" from {least} up"
    if not is_int(value):
        raise argument_error(who, value, expected)
    if least is not None and value < least:
        raise argument_error(who, value, expected, ValueError)
    return int(value)


def check_number(who: str, value: Any) -> None:
    """Raises TypeError unless ``float`` accepts the value."""
    try:
        float(value)
    except (TypeError, ValueError):
        raise argument_error(who, value, "a number") from None


def check_positive(who: str, value: Any, expected: str) -> None:
    """Raises an error unless the value is a number above 0."""
    if not _real(who, value, expected) > 0:  # NaN is not
        raise argument_error(who, value, expected, ValueError)


def check_dropout(p: float) -> None:
    """Raises torch's error for what is no probability of dropout."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def check_duration(who: str, value: Any) -> None:
    """Raises an error unless the value is a finite number >= 0."""
    expected = "a number of seconds from 0 up"
    if not 0 <= _real(who, value, expected) < math.inf:
        raise argument_error(who, value, expected, ValueError)


def _real(who: str, value: Any, expected: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise argument_error(who, value, expected)
    return float(value)


def check_shape(who: str, shape: Any, least: int = 0) -> tuple[int, ...]:
    """Returns a shape as a tuple. A tensor of one whole number is a size, as in torch."""
    if type(shape) in (tuple, torch.Size):  # the fast path of most calls
        right = all(type(n) is int and n >= least for n in shape)
        if right and math.prod(shape) < 2**63:
            return tuple(shape)
    expected = f"a sequence of whole numbers from {least} up"
    if isinstance(shape, torch.Tensor):
        raise argument_error(who, shape, expected)
    out = []
    for n in check_sequence(who, shape, expected):
        if isinstance(n, torch.Tensor) and not n.ndim and not n.is_floating_point():
            n = n.item()
        if not is_int(n):
            raise argument_error(who, shape, expected)
        out.append(int(n))
    if min(out, default=least) < least:
        raise argument_error(who, shape, expected, ValueError)
    if math.prod(out) >= 2**63:
        raise argument_error(who, shape, "a tensor of less than 2**63 elements", ValueError)
    return tuple(out)


def check_dtype(who: str, value: object) -> None:
    check_type(who, value, (torch.dtype, type(None)), "a dtype of torch, as torch.float32,")
    if str(value).startswith(("torch.qint", "torch.quint")):
        raise TypeError(
            f"{who}={value}: a quantized tensor is no DistTensor. Keep its integers in one "
            "(x.int_repr()), with the scale in another tensor"
        )


@lru_cache(maxsize=256)
def _computes_itself(kind: Any) -> bool:
    """Returns True if the class overrides ``__torch_dispatch__`` or ``__torch_function__``."""
    names = "__torch_function__", "__torch_dispatch__"
    known: list[Any] = [
        getattr(k, name) for k in (torch.Tensor, torch.nn.Parameter) for name in names
    ]
    known = [getattr(f, "__func__", f) for f in known]
    return any(getattr(f, "__func__", f) not in known for f in (getattr(kind, n) for n in names))


def has_own_operators(value: object) -> bool:
    """Returns True for a tensor of a subclass that implements operators, as a quantized weight of
    torchao: its data is in its inner tensors. A DistTensor, a DTensor and a FakeTensor do not
    count."""
    kind: Any = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not isinstance(value, torch.Tensor):
        return False
    known = "disttensor.", "torch._subclasses.", "torch.distributed."
    return not str(kind.__module__).startswith(known) and _computes_itself(kind)


def check_dense(who: str, value: Any, meta: bool = False) -> None:
    """Raises an error unless the value is a dense tensor with data: no DTensor, not sparse,
    quantized or nested. ``meta``: the meta device is allowed."""
    expected = "a dense tensor of torch that has values"
    check_type(who, value, torch.Tensor, "a tensor of torch")
    kind = type(value).__name__
    if kind in ("DistTensor", "DTensor"):
        way = "its piece on this rank, x.local," if kind == "DistTensor" else "dt.from_dtensor(x)"
        raise TypeError(f"{who} is a {kind}: {way} is expected")
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        what = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise TypeError(f"{who} is {what}: {expected} is expected")
    if has_own_operators(value):
        raise TypeError(
            f"{who} is a {kind}, a tensor subclass with operators of its own, which has no pieces "
            f"that torch.chunk cuts: {expected} is expected. Shard its inner tensors, or keep it "
            "whole on each rank, as shard_module does with a frozen parameter"
        )
    if value.is_meta and not meta:
        raise TypeError(f"{who} is on the meta device: {expected} is expected")


def check_differentiable(who: str, requires_grad: object, dtype: torch.dtype) -> None:
    """Raises torch's own error, on ranks outside the mesh too."""
    check_bool(f"{who}: requires_grad", requires_grad)
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"{who}: only tensors of floating and complex dtypes can require gradients, and this "
            f"is one of {dtype}"
        )
