"""What is to happen when: kernels are over after so much work, transfers after so much time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from disttensor.simulate.shared_clock import SharedClock

Do = Callable[[], None]


class Agenda:
    """Does what is noted, the earliest first, by a ``clock`` of work and time."""

    def __init__(self, clock: SharedClock) -> None:
        self.clock = clock
        self._by_work: list[Any] = []  # (work, number, what is done then)
        self._by_time: list[Any] = []
        self._number = count()

    def at_work(self, work: float, do: Do) -> None:
        """When ``work`` is done, in seconds of it since the begin."""
        heappush(self._by_work, (work, next(self._number), do))

    def after(self, seconds: float, do: Do) -> None:
        """So many seconds from now."""
        at = self.clock.time(self.clock.now) + seconds
        heappush(self._by_time, (at, next(self._number), do))

    def run(self) -> None:
        """All, and what is noted meanwhile."""
        clock, by_work, by_time = self.clock, self._by_work, self._by_time
        while by_work or by_time:
            if by_work and (not by_time or clock.time(by_work[0][0]) <= by_time[0][0]):
                clock.now, _, do = heappop(by_work)
            else:
                at, _, do = heappop(by_time)
                clock.now = clock.work(at)
            do()
