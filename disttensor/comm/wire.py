"""Encodes numbers for sending: dtypes that every backend reduces, and the scaling of fp16."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from disttensor.comm.groups import Group
from disttensor.comm.process_group import backend_name
from disttensor.errors import CommError

Tensor = torch.Tensor

# Dtypes that every backend sends. Others are sent as bytes, and reduced in a wider dtype.
NATIVE = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
          torch.uint8, torch.int8}  # fmt: skip

# Dtypes whose sum needs no scaling; fp16 needs it, see ``factors``.
SUMMED = NATIVE - {torch.float16}

# Backends whose AVG is a sum and one division. For others the sum is divided here.
AVERAGES = {"nccl", "gloo"} if torch.__version__ >= "2.13" else {"nccl"}


def dense(x: Tensor) -> Tensor:
    """Returns x detached, contiguous and in memory, with conjugation and negation applied."""
    if x.requires_grad:
        x = x.detach()
    if x._is_zerotensor():  # some gradients (of torch.sgn) are zeros without memory
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    return x if x.is_contiguous() else x.contiguous()


def as_bytes(x: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes. A tensor of one element may have any
    stride, which ``view`` would refuse."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def sendable(x: Tensor) -> Tensor:
    """Returns the same memory in a dtype that every backend sends."""
    return x if x.dtype in NATIVE else as_bytes(x)


def match_shapes(one: Tensor, all_: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same memory in shapes for gloo: ``all_`` joins pieces like ``one`` along dim
    0."""
    if one.ndim and one.ndim == all_.ndim and one.shape[1:] == all_.shape[1:]:
        return one, all_
    return one.view(-1), all_.view(-1)


def check_memory(kind: str, x: Tensor, op: str = "") -> Tensor:
    """Returns x, detached. Raises if its memory cannot be sent (with ``op``: reduced) directly."""
    has_memory = x.is_contiguous() and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
    real = x.dtype in NATIVE or (x.dtype.is_complex and op in ("sum", "avg"))
    encoded = not real or (op in ("max", "min") and x.dtype.is_floating_point)
    if not has_memory or (op and encoded):
        raise CommError(
            f"{kind} in place or into a given tensor sends memory as it is: contiguous, and for a "
            f"reduction of a dtype that every backend reduces, not {x.dtype} of strides "
            f"{x.stride()}. Make it so first: x.contiguous(), x.to(...)"
        )
    _check_average(x, op)
    return x.detach() if x.requires_grad else x


def check_sizes(kind: str, small: Tensor, large: Tensor, n: int) -> None:
    if small.numel() * n != large.numel() or small.dtype != large.dtype:
        raise CommError(
            f"{kind} over {n} ranks: {large.dtype} of {large.numel()} elements is not {n} times "
            f"{small.dtype} of {small.numel()}"
        )


def _check_average(x: Tensor, op: str) -> None:
    if op == "avg" and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise CommError(
            f"the average of {x.dtype} values is not {x.dtype}: reduce with 'sum' and divide"
        )


def encode_memory(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Returns the memory of x as numbers to reduce there, and its decoding function (or None)."""
    return (torch.view_as_real(x), torch.view_as_complex) if x.dtype.is_complex else (x, None)


def encode(x: Tensor, op: str) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Returns a dense tensor that every backend reduces, and its decoding function (or None)."""
    x, dtype = dense(x), x.dtype
    if op == "sum" and dtype in NATIVE:  # most often
        return x, None
    if dtype.is_complex:
        if op not in ("sum", "avg"):
            raise CommError(f"reducing complex numbers with {op!r} has no meaning on the wire")
        return torch.view_as_real(x), torch.view_as_complex
    _check_average(x, op)
    if op in ("max", "min") and dtype.is_floating_point:
        wide = x if dtype == torch.float64 else x.float()
        return as_ordered(wide, op), lambda t: from_ordered(t).to(dtype)
    if dtype == torch.uint64 and op in ("max", "min"):  # to integers in the same order
        lowest = torch.iinfo(torch.int64).min
        return x.view(torch.int64) ^ lowest, lambda t: (t ^ lowest).view(dtype)
    if op in ("any", "all"):
        wire = (x if dtype == torch.bool else x != 0).to(torch.uint8)
    elif dtype == torch.bool:
        wire = x.to(torch.int32 if op == "sum" else torch.uint8)
    elif dtype not in NATIVE:
        wire = x.to(torch.float32 if dtype.is_floating_point else torch.int64)
    else:
        return x, None
    return wire, lambda t: t.to(dtype)


def as_ordered(x: Tensor, op: str) -> Tensor:
    """Returns integers in the order of the floats, with NaN as the largest for "max" and as the
    smallest for "min". Backends compare floats, and lose a NaN that is not on the first rank."""
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    info = torch.iinfo(bits.dtype)
    ordered = bits ^ ((bits >> (info.bits - 1)) & info.max)
    return ordered.masked_fill_(x.isnan(), info.max if op == "max" else info.min)


def from_ordered(ordered: Tensor) -> Tensor:
    """Returns the floats of ``as_ordered``."""
    info = torch.iinfo(ordered.dtype)
    bits = ordered ^ ((ordered >> (info.bits - 1)) & info.max)
    return bits.view(torch.float64 if info.bits == 64 else torch.float32)


def factors(op: str, n: int, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the factors to apply before and after a sum over n ranks, so that the result is the
    ``op`` ("sum" or "avg").

    fp16 overflows above 65504 and flushes to zero below 2**-24. So a sum over n ranks is scaled by
    2**-k before, the power of two near 1/sqrt(n), and by the remaining factor after. Partial sums
    may then reach 2**k * 65504, and values keep their bits down to 2**k * 2**-24. Other dtypes need
    no factor before.
    """
    half = math.log2(n) / 2
    if dtype != torch.float16:
        k = 0
    elif op == "avg":
        k = math.floor(half + 0.5)
    else:  # two ranks have no partial sums
        k = math.ceil(half - 0.5)
    return 2.0**-k, 2.0**k / n if op == "avg" else 2.0**k


def scale_factors(op: str, wire: Tensor, group: Group) -> tuple[str, float, float]:
    """Returns the backend's reduction for ``op``, and the factors before and after it."""
    if op == "avg" and wire.dtype != torch.float16:
        if backend_name(group.pg, wire.device) in AVERAGES:
            return "avg", 1.0, 1.0
    elif op != "avg" and (op != "sum" or wire.dtype != torch.float16):
        return op, 1.0, 1.0
    return "sum", *factors(op, group.size, wire.dtype)


def add_up(rows: list[Tensor], out: Tensor, op: str) -> Tensor:
    """Writes the sum or average of ``rows`` to ``out``, in the same order on all ranks, and in
    float32 for half-precision dtypes."""
    first, second, *rest = rows
    if out.dtype in (torch.float16, torch.bfloat16):
        total = first.float().add_(second)
    else:
        total = torch.add(first, second, out=out)
    for row in rest:
        total.add_(row)
    if op == "avg":
        total.div_(len(rows))
    return out if total is out else out.copy_(total)
