"""Ring attention: the pieces of k and v are passed around the ranks. Each rank computes with the
current piece, and the results are merged by the log-sum-exp of their scores.

``ring_schedule.py`` computes which rank has which piece in which step. A rank holds three pieces of
k and v at most: its own, the current one and the next one.

With causal attention and contiguous pieces the last rank would have nearly twice the mean work. So
the sequence is redistributed inside the call: of 2 n chunks rank i gets i and 2 n - 1 - i, and the
result is sent back. Source: Liu et al. 2023; Brandon et al., "Striped attention", 2023; the
redistribution is the same as in Llama 3 (2024) and torch's context parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disttensor.core.layout import Box, Range, Ranges, balanced_ranges
from disttensor.torch_private import autocast_is_on
from ops.dtypes import autocast, wide
from ops.local import DrawProtocol, LocalCall, LocalPiece
from ops.nn.attention_block import Hidden, attend, attend_backward, merge
from ops.nn.halo import ranges_of
from ops.nn.ring_schedule import Pair, Ring
from ops.row_exchange import Exchanged, RowExchange


class Factor(NamedTuple):
    """Inputs of attention other than q, k and v. ``numbers(pair)``: the factors of dropout."""

    scale: float
    numbers: Callable[[Pair], Tensor] | None


def _hidden(factor: Factor, pair: Pair, mask: Tensor | None, q: Tensor) -> Hidden:
    keep = None if factor.numbers is None else factor.numbers(pair)
    if mask is not None:
        return Hidden(mask[_at(mask, pair)], keep=keep)
    if pair.seen != "part":
        return Hidden(causal=pair.seen == "diagonal", keep=keep)
    rows = torch.arange(*pair.row, device=q.device).unsqueeze(-1)
    return Hidden(rows >= torch.arange(*pair.key, device=q.device), keep=keep)


def _pairs(ring: Ring, factor: Factor, mask: Tensor | None, block: int) -> Iterable[Pair]:
    """Returns the parts of a block that this rank computes; several parts if positions matter."""
    if mask is None and factor.numbers is None:
        return ring.joined(block)
    pairs = ring.pairs(ring.me, block)
    return pairs if mask is None else filter(None, (_shown(mask, pair) for pair in pairs))


def _shown(mask: Tensor, pair: Pair) -> Pair | None:
    """Returns the range of rows and keys of a pair that the mask does not hide; None if it hides
    all. It may differ between ranks, because the messages do not depend on it."""
    part = mask[_at(mask, pair)]
    part = (part if part.dtype == torch.bool else part != -math.inf).flatten(0, -3).any(0)
    if not part.any():
        return None
    (r, row), (k, key) = (
        _narrowed(part.any(other), *where)
        for other, where in ((1, (pair.rows, pair.row)), (0, (pair.keys, pair.key)))
    )
    return pair._replace(rows=r, row=row, keys=k, key=key)


def _narrowed(shown: Tensor, local: slice, whole: Range) -> tuple[slice, Range]:
    if len(shown) == 1:  # for all of them
        return local, whole
    first, *_, last = [*shown.nonzero().flatten().tolist()] * 2
    size = last + 1 - first
    return (
        slice(local.start + first, local.start + first + size),
        (whole[0] + first, whole[0] + first + size),
    )


class RingAttention(torch.autograd.Function):
    """q [b, h, l, e], k [b, g, s, e], v [b, g, s, w] of this rank to [b, h, l, w]; mask: of these
    rows, and all keys."""

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, factor: Factor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        dtype = wide(q.dtype)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)
        with torch.autocast(q.device.type, enabled=False):
            for block, keys, values in _round(ring, k, v):
                for pair in _pairs(ring, factor, mask, block):
                    hidden = _hidden(factor, pair, mask, q)
                    at, to = _along(pair.rows), _along(pair.keys)
                    more = attend(q[at], keys[to], values[to], factor.scale, hidden)
                    merge(out[at], lse[at], *more)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.how = ring, factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "scaled_dot_product_attention by ring has no second derivative: compute it under "
                'attention.policy("gather") or attention.policy("heads")'
            )
        q, k, v, mask, out, lse = ctx.saved_tensors  # recomputes a checkpointed region now
        ring, factor = ctx.how
        of_q = torch.zeros_like(q, dtype=wide(q.dtype))
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[-1] else None
        own = sums = k.new_empty(0)
        back, row = None, _row(k, v)
        with torch.autocast(q.device.type, enabled=False):
            for step, (block, keys, values) in enumerate(_round(ring, k, v)):
                sums = k.new_zeros(keys.numel() + values.numel(), dtype=wide(k.dtype))
                mine = _unpacked(sums, k, v, keys.shape[2])
                for pair in _pairs(ring, factor, mask, block):
                    hidden = _hidden(factor, pair, mask, q)
                    at, to = _along(pair.rows), _along(pair.keys)
                    got = attend_backward(
                        grad[at], q[at], keys[to], values[to], out[at], lse[at], factor.scale,
                        hidden, of_mask is not None,
                    )  # fmt: skip
                    of_q[at] += got[0]
                    mine[0][to] += got[1]
                    mine[1][to] += got[2]
                    if of_mask is not None:
                        of_mask[_at(mask, pair)] += got[3]
                sums = sums.to(k.dtype)
                if step:
                    own, sums = _arrived(ring, step, back, own, sums)
                    back = ring.hop_back(step, sums, row)
                else:
                    own = sums
            own, _ = _arrived(ring, ring.size, back, own, sums)
        return None, None, of_q.to(q.dtype), *_unpacked(own, k, v, k.shape[2]), of_mask


def _along(part: slice) -> tuple[slice, ...]:
    return slice(None), slice(None), part


def _at(mask: Tensor, pair: Pair) -> tuple[Any, ...]:
    """Returns the place of the rows and keys of a pair in a mask."""
    rows = pair.rows if mask.shape[-2] > 1 else slice(None)
    return ..., rows, slice(*pair.key) if mask.shape[-1] > 1 else slice(None)


def _arrived(ring: Ring, step: int, back: Any, own: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Adds gradients that arrived in the hop before ``step``: to ``own`` the sum of this rank's own
    block, to ``sums`` the contributions of other ranks to the current block."""
    if back is None:
        return own, sums
    got, n = back.wait(), ring.size
    if step < n and ring.reach[ring.at(step)] >= step:
        sums += got[(ring.me - 1) % n]
    if ring.reach[ring.me] == step - 1:
        own += got[(ring.me + step - 1) % n]
    return own, sums


def _row(k: Tensor, v: Tensor) -> int:
    """Returns how many elements of k and v one key has."""
    return k.shape[0] * k.shape[1] * (k.shape[-1] + v.shape[-1])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the ``length`` keys and values of a block, which lie one after the other."""
    lead = k.shape[:2]
    n = lead.numel() * length * k.shape[-1]
    return flat[:n].view(*lead, length, k.shape[-1]), flat[n:].view(*lead, length, v.shape[-1])


def _round(ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (block, its keys, its values) of each step, while the next block is on its way."""
    row, held = _row(k, v), torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(ring.size):
        work = ring.hop(step + 1, held, row) if step + 1 < ring.size else None
        block, came = ring.at(step), bool(held.numel()) or not row  # else nothing was sent
        yield block, *_unpacked(held, k, v, ring.length(block) if came else 0)
        held = held.new_empty(0) if work is None else work.wait()[(ring.me - 1) % ring.size]


# The call -----------------------------------------------------------------------------------------


def ring(call: LocalCall, dropout_p: float, is_causal: bool) -> Callable[..., Any]:
    """Returns the local function of a call whose queries and keys are split by the same axes."""
    axes, (query, key) = call.axes("l"), call.inputs[:2]
    lengths = query.shape[-2], key.shape[-2]
    pieces = tuple(ranges_of(call, size, axes) for size in lengths)
    balanced = bool(query.layout.custom)
    deals = is_causal and lengths[0] == lengths[1] and not balanced
    n = len(pieces[0])
    me = call.member(axes)
    held: list[tuple[Ranges, ...]] = [tuple((r,) for r in p) for p in pieces]
    if deals or balanced:
        held = [tuple(balanced_ranges(size, i, n) for i in range(n)) for size in lengths]

    def exchange(sent: Sequence[Tensor], numels: Sequence[int]) -> Any:
        return call.collectives.exchange(sent, numels, axes)

    made = Ring(me, held[0], held[1], is_causal, exchange)
    exchange_of_rows = RowExchange(me, tuple((r,) for r in pieces[0]), held[0], exchange)

    def run(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if is_causal and attn_mask is not None:
            raise RuntimeError(
                "scaled_dot_product_attention: is_causal=True with an attn_mask: give one of them"
            )
        if not query.dtype == key.dtype == value.dtype and not autocast_is_on():
            raise RuntimeError(
                "scaled_dot_product_attention: query, key and value have one dtype, and not "
                f"{query.dtype}, {key.dtype} and {value.dtype}"
            )
        query, key, value, attn_mask = (autocast(x) for x in (query, key, value, attn_mask))
        numbers = dropout(call, query, dropout_p) if dropout_p else None
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if deals:
            query, key, value = Exchanged.apply(exchange_of_rows, query, key, value)
        shape = *query.shape[:-1], value.shape[-1]
        q, k, v = (as_four_dims(x) for x in (query, key, value))
        mask = None if attn_mask is None else as_four_dims(attn_mask, query.shape[:-3])
        out = RingAttention.apply(made, Factor(scale, numbers), q, k, v, mask)
        out = out.reshape(shape)
        return Exchanged.apply(exchange_of_rows.back, out)[0] if deals else out

    return run


def dropout(call: LocalCall, query: Tensor, p: float) -> Callable[[Pair], Tensor]:
    """Returns the factors of the weights of a pair, by position: the same bits as in one
    process."""
    draw: DrawProtocol = call.collectives.draw("fast")
    out, size = call.outputs[0], call.inputs[1].shape[-2]
    lead, dtype = out.local_box, wide(query.dtype)

    def numbers(pair: Pair) -> Tensor:
        offset = (*lead.offset[:-2], pair.row[0], pair.key[0])
        sizes = (*lead.shape[:-2], pair.row[1] - pair.row[0], pair.key[1] - pair.key[0])
        part = LocalPiece((*out.shape[:-1], size), Box(offset, sizes))
        keep: Tensor = draw.numbers("bernoulli", part, dtype, query.device, p=1.0 - p)
        return as_four_dims(keep / (1.0 - p) if p < 1.0 else keep)

    return numbers


def as_four_dims(x: Tensor, lead: Sequence[int] = ()) -> Tensor:
    """Returns [b, h, l, e] of a tensor with any leading dims. A mask is expanded to ``lead`` if
    there are several."""
    if len(lead) > 1:
        x = x.expand(*lead, *x[(None,) * max(0, 3 - x.ndim)].shape[-3:])
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.flatten(0, -4)
