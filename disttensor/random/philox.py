"""Philox4x32-10: random bits by global position, keyed by seed, call and element index.

The bits of an element depend only on (seed, call, its row-major index in the *global* tensor). So
any piece of a tensor can be drawn on any rank and device, and has the same bits as in the whole.
Work is done in chunks: a call holds a few MiB in addition to its result.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disttensor.core.layout import Box
from disttensor.torch_private import fakes

Device = torch.device | str
Span = tuple[int, int, int]  # (global size, offset, local size) of one dim
M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_KEY0, _KEY1 = 0x9E3779B9, 0xBB67AE85


def bits(seed: int, call: int, index: Tensor, lanes: int = 4) -> tuple[Tensor, ...]:
    """Returns ``lanes`` (1 to 4) int64 tensors with a uint32 per element of ``index`` (int64).

    The counter is (index low, index high, call low, call high), the key (seed low, seed high).
    Products wrap modulo 2^64: the high half is read by a shift and a mask.
    """
    k0, k1 = seed & M32, seed >> 32 & M32
    c0 = index & M32
    c1 = index >> 32
    c2 = torch.full_like(c0, call & M32)
    c3 = torch.full_like(c0, call >> 32 & M32)
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(10):  # c1 and c3 carry dirty high halves until the end
        torch.mul(c0, _MUL0, out=p0)
        torch.mul(c2, _MUL1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(M32)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(M32)
        c1, c3, p0, p1 = p1, p0, c3, c1
        k0, k1 = k0 + _KEY0 & M32, k1 + _KEY1 & M32
    return (c0, c1.bitwise_and_(M32), c2, c3.bitwise_and_(M32))[:lanes]


def derive(seed: int, *ints: int) -> int:
    """Returns a 63-bit hash of ``seed`` and ``ints`` (order matters), to seed a torch.Generator.

    One splitmix64 finalizer per word: Steele, Lea and Flood, OOPSLA 2014.
    """
    state = 0
    for word in (seed, *ints):
        state = (state + (word & _M64) + 0x9E3779B97F4A7C15) & _M64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _M64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _M64
        state ^= state >> 31
    return state >> 1


class Source(NamedTuple):
    """The bits of one random call: the ``box`` of a tensor of the global ``shape``."""

    seed: int
    call: int
    shape: Sequence[int]
    box: Box
    device: Device

    def empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(self.box.shape), dtype=dtype, device=self.device)

    def pairs(self) -> Source:
        """Returns a Source of two numbers per element, in a last dim: parts of complex numbers."""
        box = Box((*self.box.offset, 0), (*self.box.shape, 2))
        return self._replace(shape=(*self.shape, 2), box=box)

    def lanes(self) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Yields (slice of the flat local tensor, its four lanes), by chunks; nothing on ``meta``
        and in a FakeTensorMode, where there is no data."""
        spans = _spans(self.shape, self.box)
        if torch.device(self.device).type != "meta" and fakes() is None:
            for where, index in _chunks(spans, _chunk(self.device), self.device):
                yield where, bits(self.seed, self.call, index)


def _spans(shape: Sequence[int], box: Box) -> list[Span]:
    """Returns the box in as few dims as possible: a whole dim joins the dim before, or joins one of
    length 1."""
    if not len(shape) == len(box.offset) == len(box.shape) or any(
        o < 0 or n < 0 or o + n > size for size, o, n in zip(shape, *box, strict=False)
    ):
        raise ValueError(
            f"random numbers: the box at {tuple(box.offset)} of sizes {tuple(box.shape)} does not "
            f"lie in the global shape {tuple(shape)}: pass this rank's offset and sizes"
        )
    out: list[Span] = [(1, 0, 1)]
    for size, start, length in zip(shape, *box, strict=True):
        last_size, last_start, last_length = out[-1]
        if length == size or last_length == 1:
            out[-1] = (last_size * size, last_start * size + start, last_length * length)
        else:
            out.append((size, start, length))
    return out


def _row_starts(rows: Sequence[Span], start: int, stop: int, device: Device) -> Tensor:
    """Returns the global row numbers of the local rows ``start`` to ``stop``."""
    position = torch.arange(start, stop, device=device)
    out = torch.zeros_like(position)
    stride = 1
    for size, first, length in reversed(rows):
        out += (position % length + first) * stride
        position //= length
        stride *= size
    return out


def _chunk(device: Device) -> int:
    """Returns the elements at a time: as many as fit a core's cache, or fill an accelerator."""
    if torch.device(device).type != "cpu":
        return 1 << 20
    return torch.get_num_threads() << 15  # torch gives a thread no less than 2^15 elements


def _chunks(spans: Sequence[Span], step: int, device: Device) -> Iterator[tuple[slice, Tensor]]:
    """Yields (slice of the flat local tensor, global index): whole rows, or parts of a long row."""
    *rows, (size, first, length) = spans
    n_rows = math.prod(span[2] for span in rows)
    if not n_rows * length:
        return
    cols = min(length, step)
    at_once = step // cols
    for r in range(0, n_rows, at_once):
        base = _row_starts(rows, r, min(r + at_once, n_rows), device) * size
        for c in range(0, length, cols):
            along = torch.arange(first + c, first + min(c + cols, length), device=device)
            index = (base[:, None] + along).flatten()
            yield slice(r * length + c, r * length + c + index.numel()), index
