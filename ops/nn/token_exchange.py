"""Sends rows of tensors to the members of a group and back, with sizes that depend on data.

The backward is the same exchange with senders and receivers swapped, to every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Send = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


class Way(NamedTuple):
    """``sent[i]`` rows go to member i, ``received[i]`` come from it. ``send(rows, sent, received)``
    does so."""

    send: Send
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> Way:
        return Way(self.send, self.received, self.sent)


class TokenExchange(torch.autograd.Function):
    """Tensors [rows, width] each, in one exchange. ``anchor``: a tensor of the route, kept so that
    a checkpointed region is computed again before its backward communicates."""

    @staticmethod
    def forward(ctx: Any, way: Way, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.save_for_backward(anchor)
        ctx.way = way
        return exchanged(way, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (anchor,) = ctx.saved_tensors
        return None, None, *TokenExchange.apply(ctx.way.back, anchor, *grads)


def exchanged(way: Way, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the rows of all tensors side by side; as bytes where their dtypes differ."""
    if len(tensors) == 1:
        return (way.send(tensors[0], way.sent, way.received),)
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        got = way.send(torch.cat(list(tensors), 1), way.sent, way.received)
        return got.split([t.shape[1] for t in tensors], 1)
    largest = max(dtype.itemsize for dtype in dtypes)
    flat = [t.contiguous().view(torch.uint8) for t in tensors]
    gaps = [-t.shape[1] % largest for t in flat]
    pad = torch.nn.functional.pad
    packed = torch.cat([pad(t, (0, g)) for t, g in zip(flat, gaps, strict=True)], 1)
    got = way.send(packed, way.sent, way.received)
    parts = got.split([t.shape[1] + g for t, g in zip(flat, gaps, strict=True)], 1)
    return tuple(
        part[:, : f.shape[1]].view(t.dtype) for part, f, t in zip(parts, flat, tensors, strict=True)
    )
