"""Sends rows of some tensors from the ranges that each member holds to the ranges that each member
wants, in one exchange.

Each position is held by one member before and by one member after, so the inverse is the same
exchange with the two swapped. It is also the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disttensor.core.layout import Ranges

Exchange = Callable[[Sequence[Tensor], Sequence[int]], Any]
Send = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """``have[i]`` and ``want[i]``: the ranges of member i, in the order in which its local has
    them."""

    me: int
    have: tuple[Ranges, ...]
    want: tuple[Ranges, ...]
    exchange: Exchange

    @property
    def back(self) -> RowExchange:
        return RowExchange(self.me, self.want, self.have, self.exchange)

    def shared(self, sender: int, receiver: int) -> Iterator[tuple[int, int, int]]:
        """Yields the rows that one member sends to another: (start in the sender's rows, start in
        the receiver's rows, number)."""
        there = 0
        for want in self.want[receiver]:
            here = 0
            for have in self.have[sender]:
                start, stop = max(have[0], want[0]), min(have[1], want[1])
                if start < stop:
                    yield here + start - have[0], there + start - want[0], stop - start
                here += have[1] - have[0]
            there += want[1] - want[0]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Exchanges [.., my rows, width] of each tensor, all of one dtype."""
        others = [j for j in range(len(self.have)) if j != self.me]
        rows = sum(stop - start for start, stop in self.want[self.me])
        outs = tuple(t.new_empty((*t.shape[:-2], rows, t.shape[-1])) for t in tensors)
        width = sum(t.shape[:-2].numel() * t.shape[-1] for t in tensors)
        pieces, numels = [tensors[0].new_empty(0)] * len(self.have), [0] * len(self.have)
        for j in others:
            parts = [
                t.narrow(-2, at, count).reshape(-1)
                for at, _, count in self.shared(self.me, j)
                for t in tensors
            ]
            pieces[j] = torch.cat(parts) if parts else pieces[j]
            numels[j] = width * sum(count for _, _, count in self.shared(j, self.me))
        work = self.exchange(pieces, numels)
        for at, to, count in self.shared(self.me, self.me):
            for t, out in zip(tensors, outs, strict=True):
                out.narrow(-2, to, count).copy_(t.narrow(-2, at, count))
        came = work.wait()
        for j in others:
            first = 0
            for _, to, count in self.shared(j, self.me):
                for out in outs:
                    part = out.narrow(-2, to, count)
                    part.copy_(came[j][first : first + part.numel()].view(part.shape))
                    first += part.numel()
        return outs


class Exchanged(torch.autograd.Function):
    """Runs ``exchange(tensors)``, which communicates. Its backward, to every order, is
    ``exchange.back`` of the gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.save_for_backward(tensors[0].new_empty(0))
        return exchange(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors  # recomputes a checkpointed region before it communicates
        return None, *Exchanged.apply(ctx.exchange.back, *grads)


class TokenExchange(NamedTuple):
    """Sends ``sent[i]`` rows to member i and receives ``received[i]`` rows from it, by ``send(rows,
    sent, received)``. A call with several tensors, each [rows, width], sends all in one
    exchange."""

    send: Send
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> TokenExchange:
        return TokenExchange(self.send, self.received, self.sent)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Exchanges the rows of all tensors side by side; as bytes if their dtypes differ."""
        if len(tensors) == 1:
            return (self.send(tensors[0], self.sent, self.received),)
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) == 1:
            got = self.send(torch.cat(list(tensors), 1), self.sent, self.received)
            return got.split([t.shape[1] for t in tensors], 1)
        largest = max(dtype.itemsize for dtype in dtypes)
        flat = [t.contiguous().view(torch.uint8) for t in tensors]
        gaps = [-t.shape[1] % largest for t in flat]
        pad = torch.nn.functional.pad
        packed = torch.cat([pad(t, (0, g)) for t, g in zip(flat, gaps, strict=True)], 1)
        got = self.send(packed, self.sent, self.received)
        parts = got.split([t.shape[1] + g for t, g in zip(flat, gaps, strict=True)], 1)
        return tuple(
            part[:, : f.shape[1]].view(t.dtype)
            for part, f, t in zip(parts, flat, tensors, strict=True)
        )
