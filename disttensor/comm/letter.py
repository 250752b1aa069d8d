"""Formats messages for gloo: a small tensor as bytes and a word with their number, others as a
copy.

gloo ends the process if a message is larger than the receiver's buffer, and reports nothing if it
is smaller. So the tag contains the size too (``sized``): messages of different sizes mostly have
different tags and never match, which ``mismatch`` detects. If the tags are equal, the word shows
the difference. A large message has no word: the receiver's buffer ends in a mark, which only a
message of the expected size overwrites.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from ctypes import c_int64

import torch

from disttensor.comm.wire import dense

Tensor = torch.Tensor

_BARE = 1 << 10  # messages of at least this many bytes have no word
_NOTHING = -1  # the word before a message has arrived
_REFUSED = -2  # the word if the sender has no message of this size
_MARK = int.from_bytes(os.urandom(8), "little", signed=True)  # random: no tensor ends in this value
_SIZES = 61  # size codes of a tag: above the bits of a transfer, below the bit of all our tags


class WireMessage:
    """``content``: a tensor. ``wire``: the memory that is sent, or that receives the message."""

    __slots__ = ("content", "nbytes", "wire")

    def __init__(self, content: Tensor, wire: Tensor, nbytes: int) -> None:
        self.content, self.wire, self.nbytes = content, wire, nbytes

    @classmethod
    def of(cls, x: Tensor) -> WireMessage:
        """Returns a message with a copy of ``x``, since the memory of ``x`` may be written before
        the message has been sent."""
        if x.nbytes >= _BARE:
            content = copied(x)
            return cls(content, content, x.nbytes)
        letter = _with_word(x.shape, x.dtype)
        letter.content.copy_(x.detach())
        return letter

    @classmethod
    def awaited(cls, shape: Sequence[int], dtype: torch.dtype) -> WireMessage:
        """Returns a message with an empty buffer, to receive into."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _BARE:
            return _with_word(shape, dtype, _NOTHING)
        content = torch.empty(shape, dtype=dtype, device="cpu")
        letter = cls(content, content, nbytes)
        letter._end.value = _MARK
        return letter

    @classmethod
    def refusing(cls, nbytes: int) -> WireMessage:
        """Returns a message that ends the wait for a message which will never be sent."""
        if nbytes < _BARE:
            return _with_word((nbytes,), torch.uint8, _REFUSED)
        return cls(nothing := torch.zeros(8, dtype=torch.uint8, device="cpu"), nothing, nbytes)

    @property
    def is_whole(self) -> bool:
        """Returns True if a message of the expected size has arrived."""
        if self.nbytes < _BARE:
            return int(self.wire[-1]) == self.nbytes
        return self._end.value != _MARK

    @property
    def _end(self) -> c_int64:
        return c_int64.from_address(self.content.data_ptr() + self.nbytes - 8)


def _with_word(shape: Sequence[int], dtype: torch.dtype, word: int | None = None) -> WireMessage:
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    pairs = (nbytes + 8 + 15) // 16  # of words: elements have up to 16 bytes
    wire = torch.empty(2 * pairs, dtype=torch.int64, device="cpu")
    wire[-1].fill_(nbytes if word is None else word)
    return WireMessage(wire.view(dtype)[:numel].view(shape), wire, nbytes)


def copied(x: Tensor) -> Tensor:
    return dense(x.detach().clone(memory_format=torch.contiguous_format))


def sized(tag: int, nbytes: int) -> int:
    return tag | nbytes % _SIZES << 24
