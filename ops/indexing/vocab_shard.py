"""owned: rows of a split dim by number. A row's owner has it, the others zeros: they add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Owned:
    """The piece [offset, offset + size) of a dim of ``total`` rows, looked up by global numbers.

    Numbers that no rank owns stay out of range, so that torch raises what it raises on one process.
    """

    __slots__ = ("offset", "size", "total")

    def __init__(self, offset: int, size: int, total: int) -> None:
        self.offset, self.size, self.total = offset, size, total

    def find(self, index: Tensor, negative: bool = False) -> tuple[Tensor, Tensor]:
        """(numbers within the piece, 0 for rows of others; mask of the rows of others).

        ``negative``: numbers below zero count from the end."""
        if negative:
            index = torch.where(index < 0, index + self.total, index)
        end = self.offset + self.size
        if not self.size:
            others = (index >= 0) & (index < self.total)
        elif not self.offset:
            others = (index >= end) & (index < self.total)
        elif end == self.total:
            others = (index < self.offset) & (index >= 0)
        else:
            others = ((index < self.offset) & (index >= 0)) | (
                (index >= end) & (index < self.total)
            )
        return (index - self.offset).masked_fill(others, 0), others

    def rows(self, input: Tensor, dim: int = 0) -> Tensor:
        """The piece, never empty: a row of zeros, in the graph, where this rank owns nothing."""
        if self.size:
            return input
        # not cat: it leaves vectors of length 0 out of the graph
        return F.pad(input, (0, 0) * (input.ndim - 1 - dim) + (0, 1))
