"""Moves of Balanced(d), a Shard(d) of the rows in another order. From and to Replicate and Partial
the rows are permuted locally, and the moves of Shard do the rest. Between Shard and Balanced there
is an all-to-all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from disttensor.cache import cached
from disttensor.comm import collectives
from disttensor.core.layout import Layout, balanced_ranges, chunk
from disttensor.core.placement import Balanced, Partial, Replicate, Shard
from disttensor.core.spec import DistSpec
from disttensor.torch_private import outside_modes
from ops.row_exchange import RowExchange
from reshard.all_gather import all_gather
from reshard.all_to_all import all_to_all
from reshard.local_moves import pad_with_neutral
from reshard.reductions import reduce_scatter
from reshard.registry import Axes, Tensor, register

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _dim(spec: DistSpec, axis: int) -> int:
    found = spec.layout.dim_of(axis)
    assert found is not None
    return found


def _contiguous(spec: DistSpec, axes: Axes) -> DistSpec:
    layout = spec.layout
    own = tuple(entry for entry in layout.custom if entry[0] not in axes)
    return spec.with_layout(Layout(layout.dims, layout.partial, own))


@cached(256)
def _order(size: int, parts: int, back: bool) -> Tensor:
    """Returns the rows of piece 0, of piece 1, ...; ``back``: the inverse permutation."""
    with outside_modes():
        device = torch.device("cpu")
        pieces = [balanced_ranges(size, i, parts) for i in range(parts)]
        order = torch.cat([torch.arange(*r, device=device) for piece in pieces for r in piece])
        return order.argsort() if back else order


def _reordered(x: Tensor, spec: DistSpec, axes: Axes, back: bool = False) -> Tensor:
    """Returns x with the rows in the order of the pieces of ``spec``, or in the order before."""
    (axis,) = axes
    dim = _dim(spec, axis)
    order = _order(x.shape[dim], spec.mesh.shape[axis], back).to(x.device)
    if x.is_complex():
        return x.index_select(dim, order)
    same_bits = _INTEGERS[x.itemsize]  # torch selects rows of these in every dtype
    return x.resolve_neg().view(same_bits).index_select(dim, order).view(x.dtype)


@register(Replicate, Balanced, kind="slice")
def keep_rows(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Cuts ``f32[8]`` to ``f32[8@cp]``: rows 0, 1, 6, 7 are on the first of two ranks. Local."""
    (axis,) = axes
    dim, mesh = _dim(dst, axis), src.mesh
    place = mesh.coordinate
    assert place is not None
    ranges = balanced_ranges(x.shape[dim], place[axis], mesh.shape[axis])
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)


@register(Balanced, Replicate, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * src_bytes)
def collect(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Gathers the rows by one all-gather."""
    whole = all_gather(x, _contiguous(src, axes), dst, axes)
    return _reordered(whole, src, axes, back=True)


@register(Partial, Balanced, cost=lambda src_bytes, dst_bytes, ranks: (ranks - 1) * dst_bytes)
def reduce_and_deal(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Reduces and cuts by one reduce-scatter."""
    return reduce_scatter(_reordered(x, dst, axes), src, _contiguous(dst, axes), axes)


@register(Balanced, Partial, kind="to_partial")
def pad(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Puts x at its rows in a tensor of neutral elements. Local."""
    whole = pad_with_neutral(x, _contiguous(src, axes), dst, axes)
    return _reordered(whole, src, axes, back=True)


@register(Balanced, Shard, kind="all_to_all", cost=lambda src_bytes, dst_bytes, ranks: dst_bytes)
@register(Shard, Balanced, kind="all_to_all", cost=lambda src_bytes, dst_bytes, ranks: dst_bytes)
def deal_out(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Exchanges contiguous rows (or pieces of another dim) to balanced rows, or back."""
    (axis,) = axes
    back = any(a == axis for a, _ in src.layout.custom)
    if _dim(src, axis) == _dim(dst, axis):
        return _exchanged(x, src, axis, to_balanced=not back)
    x = x if back else _reordered(x, dst, axes)
    x = all_to_all(x, _contiguous(src, axes), _contiguous(dst, axes), axes)
    return _reordered(x, src, axes, back=True) if back else x


def _exchanged(x: Tensor, spec: DistSpec, axis: int, to_balanced: bool) -> Tensor:
    dim, mesh = _dim(spec, axis), spec.mesh
    n, place = mesh.shape[axis], mesh.coordinate
    assert place is not None
    dims = tuple(tuple(a for a in have if a != axis) for have in spec.layout.dims)
    size = spec.with_layout(Layout(dims, spec.layout.partial)).local_shape[dim]
    group = mesh.group((axis,))
    even = tuple(((s, s + k),) for s, k in (chunk(size, n, i) for i in range(n)))
    uneven = tuple(balanced_ranges(size, i, n) for i in range(n))
    have, want = (even, uneven) if to_balanced else (uneven, even)

    def exchange(pieces: Sequence[Tensor], numels: Sequence[int]) -> Any:
        return collectives.start_async(collectives.all_to_all, pieces, numels, group)

    rows = x.movedim(dim, 0)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    (out,) = RowExchange(place[axis], have, want, exchange)([flat])
    return out.view(len(out), *rows.shape[1:]).movedim(0, dim).contiguous()
