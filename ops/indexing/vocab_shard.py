"""Looks up rows of a split dim by number: the owner of a row returns it, the others return zeros,
and the results add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops.local import LocalShardInfo

Tensor = torch.Tensor


class Owned:
    """The piece [offset, offset + size) of a dim of ``total`` rows, looked up by global numbers.

    Numbers that no rank owns stay out of range, so that torch raises what it raises on one process.
    """

    __slots__ = ("offset", "size", "total")

    def __init__(self, offset: int, size: int, total: int) -> None:
        self.offset, self.size, self.total = offset, size, total

    @classmethod
    def of(cls, piece: LocalShardInfo, dim: int) -> Owned:
        """Returns the rows of ``dim`` that this rank's piece of a tensor has."""
        return cls(piece.local_box.offset[dim], piece.local_shape[dim], piece.shape[dim])

    def find(self, index: Tensor, negative: bool = False) -> tuple[Tensor, Tensor]:
        """Returns (numbers within the piece, 0 for rows of other ranks; mask of the rows of other
        ranks).

        ``negative``: numbers wrap around, so a negative number counts from the end."""
        if negative and index.numel():
            index = index % self.total
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
        # where this rank owns nothing, ``rows`` has a row 0
        here = index - self.offset if self.size else torch.full_like(index, -1)
        return here.masked_fill(others, 0), others

    @staticmethod
    def without(rows: Tensor, others: Tensor) -> Tensor:
        """Returns the rows, with -0.0 for rows of other ranks: a sum with 0.0 would lose the sign
        of a -0.0."""
        return rows.masked_fill(others, complex(-0.0, -0.0) if rows.is_complex() else -0.0)

    def gather(
        self, input: Tensor, dim: int, here: Tensor, index: Tensor,
        error: type[Exception] = RuntimeError,
    ) -> Tensor:  # fmt: skip
        """Returns the elements ``here`` of the piece along ``dim``. Raises ``error`` for a number
        of ``index`` that no rank owns, as one process does."""
        try:
            return self.rows(input, dim).gather(dim, here)
        except RuntimeError:
            outside = index[(index < 0) | (index >= self.total)]
            if not len(outside):
                raise
            raise error(
                f"index {int(outside[0])} is out of bounds for dimension {dim} with size "
                f"{self.total}"
            ) from None

    def rows(self, input: Tensor, dim: int = 0) -> Tensor:
        """Returns the piece, never empty: a row of zeros, in the graph, where this rank owns
        nothing."""
        if self.size:
            return input
        # cat would leave vectors of length 0 out of the graph
        return F.pad(input, (0, 0) * (input.ndim - 1 - dim) + (0, 1))
