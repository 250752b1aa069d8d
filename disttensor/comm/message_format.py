"""Formats messages for gloo: the bytes of a tensor, and behind them a word with their number.

gloo ends the process if a message is larger than the receiver's buffer, and reports nothing if it
is smaller. So the tag contains the size too (``tag_with_size``): messages of different sizes mostly
have different tags and never match, which ``pending_receives`` detects. If the tags are equal, the
end of the receiver's buffer shows that a smaller message has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

_NOTHING = -1  # the word before a message has arrived
_SIZES = 61  # size codes of a tag: above the bits of a transfer, below the bit of all our tags


class WireMessage:
    """The memory of a message of ``nbytes`` bytes and of the word behind them: ``wire``."""

    __slots__ = ("nbytes", "wire")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.wire = torch.empty((nbytes + 7) // 8 + 1, dtype=torch.int64, device="cpu")
        self.wire[-1] = _NOTHING

    @classmethod
    def copy_of(cls, x: Tensor) -> WireMessage:
        """Returns a message with a copy of ``x``, since the memory of ``x`` may be written before
        the message has been sent."""
        message = cls(x.nbytes)
        message.content(x.shape, x.dtype).copy_(x.detach())
        message.wire[-1] = x.nbytes
        return message

    def content(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the bytes as a tensor, whose base is not ``wire``."""
        return self.wire.view(torch.uint8)[: self.nbytes].view(dtype).view(shape).detach()

    @property
    def has_arrived(self) -> bool:
        """Returns True if a message of the expected size has arrived."""
        return int(self.wire[-1]) == self.nbytes


def placeholder() -> Tensor:
    """Returns the memory of a message that ends the wait for a message which will never be sent:
    it is smaller than every other message."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def tag_with_size(tag: int, nbytes: int) -> int:
    return tag | nbytes % _SIZES << 24
