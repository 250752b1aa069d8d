"""How a message travels over gloo: a small one as the bytes of a tensor and one word behind them
that says how many they are, any other as a copy of the tensor.

gloo ends the process where a message is larger than what the receiver has made room for, and says
nothing where it is smaller. So the size is in the tag as well (``sized``): of two sizes most have
two tags, and never meet, of which ``mismatch`` hears. Two that do meet are told by the word; or by
a mark at the end of the receiver's room, which a message of that size overwrites.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from ctypes import c_int64

import torch

from disttensor.comm.wire import dense

Tensor = torch.Tensor

_BARE = 1 << 10  # bytes from which on no word is sent
_NOTHING = -1  # what the word is before anything has come
_REFUSED = -2  # what it is where the sender has no message of this size
_MARK = int.from_bytes(os.urandom(8), "little", signed=True)  # no tensor ends in it
_SIZES = 61  # as many as fit above the bits of a transfer, below the one of all our tags


class WireMessage:
    """``content``: a tensor. ``wire``: the memory that is sent, or is room for what comes."""

    __slots__ = ("content", "nbytes", "wire")

    def __init__(self, content: Tensor, wire: Tensor, nbytes: int) -> None:
        self.content, self.wire, self.nbytes = content, wire, nbytes

    @classmethod
    def of(cls, x: Tensor) -> WireMessage:
        """With a copy of ``x``: its own memory may be written to, by torch and by who does not ask
        torch, before the message has gone."""
        if x.nbytes >= _BARE:
            content = copied(x)
            return cls(content, content, x.nbytes)
        letter = _with_word(x.shape, x.dtype)
        letter.content.copy_(x.detach())
        return letter

    @classmethod
    def awaited(cls, shape: Sequence[int], dtype: torch.dtype) -> WireMessage:
        """Room for one that comes."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _BARE:
            return _with_word(shape, dtype, _NOTHING)
        content = torch.empty(shape, dtype=dtype, device="cpu")
        letter = cls(content, content, nbytes)
        letter._end.value = _MARK
        return letter

    @classmethod
    def refusing(cls, nbytes: int) -> WireMessage:
        """In place of one that never comes."""
        if nbytes < _BARE:
            return _with_word((nbytes,), torch.uint8, _REFUSED)
        return cls(nothing := torch.zeros(8, dtype=torch.uint8, device="cpu"), nothing, nbytes)

    @property
    def is_whole(self) -> bool:
        """Did a message of this size arrive?"""
        if self.nbytes < _BARE:
            return int(self.wire[-1]) == self.nbytes
        return self._end.value != _MARK

    @property
    def _end(self) -> c_int64:
        return c_int64.from_address(self.content.data_ptr() + self.nbytes - 8)


def _with_word(shape: Sequence[int], dtype: torch.dtype, word: int | None = None) -> WireMessage:
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    pairs = (nbytes + 8 + 15) // 16  # of words: whole elements of 16 bytes too
    wire = torch.empty(2 * pairs, dtype=torch.int64, device="cpu")
    wire[-1].fill_(nbytes if word is None else word)
    return WireMessage(wire.view(dtype)[:numel].view(shape), wire, nbytes)


def copied(x: Tensor) -> Tensor:
    return dense(x.detach().clone(memory_format=torch.contiguous_format))


def sized(tag: int, nbytes: int) -> int:
    return tag | nbytes % _SIZES << 24
