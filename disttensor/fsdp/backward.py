"""One backward: a reduction starts when the last gradient of a segment has arrived, and overlaps
with the rest of the backward.

All ranks start reductions in the reverse order of the segments' forwards: a segment that is ready
waits for entered segments that come before it. Segments without forward hooks are entered by their
gradients. They wait for the segments that the last backward reached with them, because gradients
arrive in another order on a rank with an empty piece, whose graph differs. The end of the backward
reduces all other segments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from disttensor.comm.work import Work
from disttensor.fsdp.reduce import Steps
from disttensor.fsdp.segment import Segment

_MOST = 2  # reductions to shards under way at once: each holds the gradients of a segment


class ReduceOrder:
    """The state of one call of autograd.

    reduce(segment)  returns the steps that reduce the gradients of a segment
    bounded          True if reductions need extra memory: few of them run at once
    """

    def __init__(self, id: int, reduce: Callable[[Segment], list[Steps]], bounded: bool) -> None:
        self.id, self.reduce, self.bounded = id, reduce, bounded
        self.keeps_graph = torch.is_grad_enabled()  # create_graph=True
        self.entered: dict[Segment, None] = {}
        self.to_leave: dict[Segment, int] = {}  # forwards whose nodes have not all run
        self.came: dict[Segment, set[int]] = {}  # leaves that have their gradient
        self.waiting: dict[Segment, set[int]] = {}  # expected leaves without a gradient so far
        self.together: set[int] = set()  # ``companions`` that are in ``order``, by identity
        self.order: list[tuple[int, int, Segment]] = []  # a heap: the segments to start next
        self.ready: set[Segment] = set()
        self.launched: set[Segment] = set()
        self.late: set[Segment] = set()
        self.running: deque[tuple[Steps, Work[Any]]] = deque()

    def plan(self, segment: Segment) -> None:
        """Counts a forward of the segment that the backward will enter and leave."""
        self.to_leave[segment] = self.to_leave.get(segment, 0) + 1

    def recomputed(self, segment: Segment) -> None:
        """Frees the segment after a recomputed forward, unless the backward has entered it."""
        if segment not in self.entered:
            segment.free()

    def begin(self, segment: Segment) -> None:
        if segment not in self.entered:
            self.entered[segment] = None
            self.came[segment] = set()
            self.waiting[segment] = set(segment.expected)
            companions = segment.companions
            if id(companions) not in self.together:
                self.together.add(id(companions))
                self._await(companions)
            if segment not in companions:
                self._await([segment])

    def _await(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            heapq.heappush(self.order, (-segment.position, segment.index, segment))

    def arrived(self, segment: Segment, leaf: int) -> None:
        """Records that a leaf has its gradient."""
        self.begin(segment)
        self.came[segment].add(leaf)
        if segment in self.launched:
            self.late.add(segment)
            return
        waiting = self.waiting[segment]
        waiting.discard(leaf)
        if segment.expected and not waiting:
            self.ready.add(segment)
            self.launch()

    def leave(self, segment: Segment, launch: bool) -> None:
        """Leaves a forward. The first backward does not know the number of gradients: all have
        arrived when it has left every forward, unless ``launch`` is False."""
        self.to_leave[segment] -= 1
        known = segment.expected or segment in self.launched
        if launch and not known and self.is_done_with(segment):
            self.ready.add(segment)
            self.launch()

    def launch(self) -> None:
        """Starts the segments that are ready, in order."""
        while self.order:
            segment = self.order[0][-1]
            if segment not in self.launched:
                if segment not in self.ready:
                    break
                self.start(segment)
            heapq.heappop(self.order)

    def start(self, segment: Segment) -> None:
        self.launched.add(segment)
        while self.running and (
            self.running[0][1].done() or (self.bounded and len(self.running) >= _MOST)
        ):
            self._resume()
        for steps in self.reduce(segment):
            self._advance(steps)

    def is_done_with(self, segment: Segment) -> bool:
        """Returns True if all nodes that need the parameters of the segment have run."""
        return not self.to_leave.get(segment)

    def in_order(self) -> list[Segment]:
        """Returns the entered segments in the order that all ranks share."""
        return sorted(self.entered, key=lambda s: (-s.position, s.index))

    def finish(self) -> None:
        """Ends the backward: starts the remaining reductions, and waits for all."""
        last_first = self.in_order()
        for segment in last_first:
            if segment not in self.launched:
                self.start(segment)
        while self.running:
            self._resume()
        for segment in last_first:
            for steps in self.reduce(segment) if segment in self.late else ():
                self._advance(steps)
        while self.running:
            self._resume()
        for segment, came in self.came.items():
            if came:  # else its gradients may be deferred to a later backward
                segment.expected = frozenset(came)
        together = dict.fromkeys(s for s, came in self.came.items() if came and not s.copied)
        for segment in together:
            segment.companions = together

    def abandon(self) -> None:
        """Finishes started reductions after an error. Some may be over, depending on the rank;
        gradients must not depend on it."""
        while self.running:
            self._resume()

    def _resume(self) -> None:
        steps, work = self.running.popleft()
        work.wait()
        self._advance(steps)

    def _advance(self, steps: Steps) -> None:
        work = next(steps, None)
        if work is not None:
            self.running.append((steps, work))
