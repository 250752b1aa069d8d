"""Placements: a mesh axis shards a dim, replicates the tensor, or has a pending reduction.

>>> [isinstance(p, dt.Placement) for p in (dt.Shard(0), dt.Replicate(), dt.Partial("max"))]
[True, True, True]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disttensor.checks import check_int

REDUCTIONS = ("sum", "avg", "max", "min", "prod", "any", "all")

# The dtypes of DistTensors, and the reductions whose result has the dtype of the values.
# float8_e8m0fnu has no zero, which a pending sum needs.
_OF_INTEGERS = ("sum", "max", "min", "prod")
_REDUCTIONS_OF = {
    torch.bool: ("max", "min", "any", "all"),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), _OF_INTEGERS),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), _OF_INTEGERS),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), REDUCTIONS[:5]),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), REDUCTIONS[:5]),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), REDUCTIONS[:5]),
    **dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), ("sum", "avg")),
    torch.float8_e8m0fnu: ("max", "min", "prod"),
}


class _TorchMethods:
    """Methods of torch's placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Returns True for ``Shard`` (of this dim), and False for ``Balanced``, whose pieces have
        other rows."""
        return type(self) is Shard and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        return type(self) is Replicate

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return type(self) is Partial and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True, repr=False)
class Shard(_TorchMethods):
    """Rank i of the mesh axis holds the i-th contiguous piece of ``dim`` (as torch.chunk cuts it).

    ``order`` is this axis's position among the axes that split the same dim, major first. None, the
    usual value, means mesh order.

    >>> x = dt.shard_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Replicate()])
    >>> x.placements
    (Shard(0), Replicate())
    """

    dim: int
    order: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_int(f"{name}: dim", self.dim)
        if self.order is not None:
            check_int(f"{name}: order", self.order, 0)

    def __repr__(self) -> str:
        return (
            f"Shard({self.dim})" if self.order is None else f"Shard({self.dim}, order={self.order})"
        )

    def __str__(self) -> str:
        return f"S({self.dim})" if self.order is None else f"S({self.dim}, order={self.order})"


@dataclass(frozen=True, slots=True, repr=False)
class Balanced(Shard):
    """Rank i of the n of the mesh axis holds two pieces of ``dim``, the i-th from the front and the
    i-th from the back: as many rows as ``Shard(dim)`` has, and an even share of the work of causal
    attention.

    Functions that treat each row separately keep it, attention uses the ring, and all others
    exchange the rows for contiguous ones (docs/long_context.md).

    >>> x = dt.shard_tensor(torch.arange(6), mesh, [dt.attention.Balanced(0), dt.Replicate()])
    >>> (x + 1).placements, (x + 1).tolist()
    ((Balanced(0), Replicate()), [1, 2, 3, 4, 5, 6])
    """

    def __repr__(self) -> str:
        return f"Balanced({self.dim})"

    def __str__(self) -> str:
        return f"B({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(_TorchMethods):
    """Every rank of the mesh axis holds the same bits.

    >>> dt.zeros(3, mesh=mesh, placements=[dt.Replicate(), dt.Replicate()]).dims_mapping
    [-1]
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(_TorchMethods):
    """The value is the elementwise ``reduce_op`` over the ranks of the mesh axis, which is still
    pending.

    >>> x = dt.shard_tensor(torch.ones(3), mesh, [dt.Replicate(), dt.Partial("sum")])
    >>> x.partial_status, x.sum().item()
    ({1: 'sum'}, 3.0)
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCTIONS:
            raise ValueError(
                f"Partial({self.reduce_op!r}): no such reduction; use one of "
                f"{', '.join(REDUCTIONS)}"
            )

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement = Shard | Replicate | Partial
_OF_TORCH = "torch.distributed.tensor.placement_types"


def as_placement(value: Any) -> Any:
    """Returns the placement for one of torch's, or Replicate for None. Any other value is returned
    unchanged."""
    if value is None:
        return Replicate()
    if type(value).__module__ != _OF_TORCH:
        return value
    name = type(value).__name__  # private ones, as _StridedShard, have no counterpart
    if name == "Partial":
        return Partial({"product": "prod"}.get(value.reduce_op, value.reduce_op))
    return Shard(value.dim) if name == "Shard" else Replicate() if name == "Replicate" else value


def show(placements: Sequence[Placement]) -> str:
    """Returns ``[S(0), R]``, the form that errors and logs print."""
    return "[" + ", ".join(str(p) for p in placements) + "]"


def check_reductions(dtype: torch.dtype, pending: Sequence[tuple[str, str]]) -> None:
    """Raises TypeError for a dtype that torch cannot copy, and ValueError if a reduction of
    ``pending`` (axis, op) has no result of this dtype."""
    known = _REDUCTIONS_OF.get(dtype)
    if known is None:
        raise TypeError(f"no DistTensor has the dtype {dtype}: use x.view(torch.uint8)")
    for axis, op in pending:
        if op not in known:
            names = ", ".join(f"Partial({name!r})" for name in known)
            raise ValueError(
                f"Partial({op!r}) of {dtype} on mesh axis {axis!r} has no meaning; use {names}, "
                "or another dtype"
            )


def neutral_element(op: str, dtype: torch.dtype) -> Any:
    """Returns the neutral element of a reduction: 0 (-0.0, which keeps the sign of a zero), 1, or
    the far end of the dtype."""
    if op in ("sum", "avg"):
        return complex(-0.0, -0.0) if dtype.is_complex else -0.0 if dtype.is_floating_point else 0
    if op in ("prod", "all"):
        return 1
    if dtype == torch.bool:
        return op == "min"
    info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point and (dtype.itemsize > 1 or dtype is torch.float8_e5m2):
        return -math.inf if op == "max" else math.inf  # the other float8 have no infinity
    return info.min if op == "max" else info.max
