"""Sends rows of tensors to the members of a group and back, with sizes that depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Send = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


class TokenExchange(NamedTuple):
    """``sent[i]`` rows go to member i, ``received[i]`` come from it. ``send(rows, sent, received)``
    does so. Called with tensors [rows, width] each, it sends all in one exchange."""

    send: Send
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> TokenExchange:
        return TokenExchange(self.send, self.received, self.sent)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the rows of all tensors side by side; as bytes where their dtypes differ."""
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
