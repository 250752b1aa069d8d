"""The schedule of ring attention: which rank has which block of k and v in which step, the same on
all ranks.

In step t rank i computes with block (i - t) mod n, and receives the next block from its neighbour.
In the backward the blocks go round again. The sum of the gradients of each block follows it: it
starts at the first rank that is not the owner, and ends at the owner. A block is passed on as long
as a rank needs it: ``reach`` hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from disttensor.core.layout import Range, Ranges
from ops.row_exchange import Exchange


class Pair(NamedTuple):
    """Queries of this rank and keys of a block: their ranges in the locals, and in the global
    tensor. ``seen``: "all" are visible, half ("diagonal"), or "part": by positions."""

    rows: slice
    keys: slice
    row: Range
    key: Range
    seen: str


@dataclass(frozen=True, slots=True)
class Ring:
    """The rows of each member: ``rows[i]`` and ``keys[i]`` are ranges of the queries and of the
    keys of member i, in the order of its locals."""

    me: int
    rows: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    causal: bool
    exchange: Exchange
    reach: tuple[int, ...] = field(init=False)  # the number of hops of each block

    def __post_init__(self) -> None:
        object.__setattr__(self, "reach", tuple(map(self._reach, range(self.size))))

    @property
    def size(self) -> int:
        return len(self.rows)

    def length(self, block: int) -> int:
        return sum(stop - start for start, stop in self.keys[block])

    def pairs(self, member: int, block: int) -> Iterator[Pair]:
        """Yields the parts of ``block`` that ``member`` computes."""
        r = 0
        for row in self.rows[member]:
            k = 0
            for key in self.keys[block]:
                there = row[0] < row[1] and key[0] < key[1]
                if there and not (self.causal and key[0] >= row[1]):
                    free = not self.causal or key[1] - 1 <= row[0]
                    seen = "all" if free else "diagonal" if row[0] == key[0] else "part"
                    rows = slice(r, r + row[1] - row[0])
                    yield Pair(rows, slice(k, k + key[1] - key[0]), row, key, seen)
                k += key[1] - key[0]
            r += row[1] - row[0]

    def joined(self, block: int) -> list[Pair]:
        """Returns the pairs of this rank and a block, merged to fewer pairs: neighbours of which
        everything is visible, and this rank's own block as one pair. The global ranges of merged
        pairs have no meaning."""
        mine = self.rows[self.me]
        if (
            self.causal
            and block == self.me
            and mine == self.keys[block]
            and list(mine) == sorted(mine)
        ):
            every, whole = slice(0, self.length(block)), (mine[0][0], mine[-1][1])
            return [Pair(every, every, whole, whole, "diagonal")] if self.length(block) else []
        found: list[Pair] = []
        for pair in self.pairs(self.me, block):
            found.append(pair)
            while len(found) > 1 and (one := _side_by_side(*found[-2:])) is not None:
                found[-2:] = [one]
        return found

    def _reach(self, block: int) -> int:
        needs = (i for i in range(self.size) if next(self.pairs(i, block), None) is not None)
        return max(((i - block) % self.size for i in needs), default=0)

    def at(self, step: int) -> int:
        """Returns the block that this rank has in a step."""
        return (self.me - step) % self.size

    def hop(self, step: int, held: Tensor, row: int) -> Any:
        """Sends blocks to the rank that has them in ``step``. Returns the running work, or None if
        no block is sent. ``held``: the block of this rank in the step before, with ``row`` elements
        for each key."""
        if max(self.reach) < step:
            return None
        sends = self.reach[self.at(step - 1)] >= step
        comes = self.reach[self.at(step)] >= step
        return self._exchanged(
            {(self.me + 1) % self.size: held} if sends else {},
            {(self.me - 1) % self.size: self.length(self.at(step)) * row} if comes else {},
            held,
        )

    def hop_back(self, step: int, sums: Tensor, row: int) -> Any:
        """Sends the gradients that were summed up to ``step`` to the rank that adds to them next,
        or home. Returns the running work, or None if nothing is sent."""
        if max(self.reach) < step:
            return None
        block, coming, n = self.at(step), self.at(step + 1), self.size
        far = self.reach[block]
        sends = {} if far < step else {block if far == step else (self.me + 1) % n: sums}
        comes = {}
        if step + 1 < n and self.reach[coming] > step:
            comes[(self.me - 1) % n] = self.length(coming) * row
        if self.reach[self.me] == step:
            comes[(self.me + step) % n] = self.length(self.me) * row
        return self._exchanged(sends, comes, sums)

    def _exchanged(self, sends: dict[int, Tensor], comes: dict[int, int], like: Tensor) -> Any:
        none = like.new_empty(0)
        pieces = [sends.get(i, none) for i in range(self.size)]
        return self.exchange(pieces, [comes.get(i, 0) for i in range(self.size)])


def _side_by_side(a: Pair, b: Pair) -> Pair | None:
    """Returns two pairs of which everything is visible as one pair, if it is a rectangle; else
    None."""
    if a.seen != "all" or b.seen != "all":
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return a._replace(keys=slice(a.keys.start, b.keys.stop))
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return a._replace(rows=slice(a.rows.start, b.rows.stop))
    return None
