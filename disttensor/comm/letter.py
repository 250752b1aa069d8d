"""How a message travels over gloo: the bytes of a tensor, and behind them one word that says how
many they are.

gloo ends the process where a message is larger than what the receiver has made room for, and says
nothing where it is smaller. So the size is in the tag as well (``sized``): of two sizes most have
two tags, and never meet, of which ``mismatch`` hears. Two that do meet are told by the word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor

_NOTHING = -1  # what the word is before anything has come
_REFUSED = -2  # what it is where the sender has no message of this size
_SIZES = 61  # as many as fit above the bits of a transfer, below the one of all our tags


class Letter:
    """``content``: a tensor. ``words``: the same memory and what follows, as it is sent."""

    __slots__ = ("content", "nbytes", "words")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, word: int | None = None) -> None:
        numel = math.prod(shape)
        self.nbytes = numel * dtype.itemsize
        pairs = (self.nbytes + 8 + 15) // 16  # of words: whole elements of 16 bytes too
        self.words = torch.empty(2 * pairs, dtype=torch.int64)
        self.words[-1].fill_(self.nbytes if word is None else word)
        self.content = self.words.view(dtype)[:numel].view(shape)

    @classmethod
    def of(cls, x: Tensor) -> Letter:
        """With a copy of the elements of ``x``."""
        letter = cls(x.shape, x.dtype)
        letter.content.copy_(x.detach())
        return letter

    @classmethod
    def awaited(cls, shape: Sequence[int], dtype: torch.dtype) -> Letter:
        """Room for one that comes."""
        return cls(shape, dtype, _NOTHING)

    @classmethod
    def refusing(cls, nbytes: int) -> Letter:
        """In place of one that never comes."""
        return cls((nbytes,), torch.uint8, _REFUSED)

    @property
    def is_whole(self) -> bool:
        """Did a message of this size arrive?"""
        return int(self.words[-1]) == self.nbytes

    @property
    def is_refused(self) -> bool:
        return int(self.words[-1]) == _REFUSED


def sized(tag: int, nbytes: int) -> int:
    return tag | nbytes % _SIZES << 24
