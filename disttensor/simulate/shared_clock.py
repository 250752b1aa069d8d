"""The time of a step where ranks share devices: one that computes slows the others down.

All that compute at a time come on equally fast, so one number says how far: seconds of *work*,
which go by as those of *time* do while each of them has a device of its own, and slower while not.
A kernel that takes a second takes a second of work, whatever the others do meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class SharedClock:
    """``sharing``: so many of the ``world``'s ranks share a device, and each of them that computes
    has as much of it as the others."""

    def __init__(self, sharing: float, world: int) -> None:
        self.share = sharing / world
        self.busy = 0.0  # ranks that want their device
        self.now = 0.0  # in seconds of work
        self._turns = [(0.0, 0.0, 1.0)]  # (work, time, work for a second) from here on

    def add(self, ranks: float) -> None:
        """From now on so many ranks more want their device."""
        self.busy += ranks
        rate = 1.0 / max(1.0, self.share * self.busy)
        if rate != self._turns[-1][2]:
            self._turns.append((self.now, self.time(self.now), rate))

    def time(self, work: float) -> float:
        """When ``work``, which is not before now, is done, if nothing changes until then."""
        begin, at, rate = self._turns[-1]
        return at + (work - begin) / rate

    def work(self, time: float) -> float:
        begin, at, rate = self._turns[-1]
        return max(self.now, begin + (time - at) * rate)

    def times(self, works: Iterable[float]) -> list[float]:
        """When it was that so much work had been done."""
        if len(self._turns) == 1:
            return list(works)
        begins = [begin for begin, _, _ in self._turns]
        out = []
        for work in works:
            begin, at, rate = self._turns[bisect_right(begins, work) - 1]
            out.append(at + (work - begin) / rate)
        return out
