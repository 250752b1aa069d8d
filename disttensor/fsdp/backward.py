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
from disttensor.fsdp.segment import Segment
from disttensor.fsdp.states import ReduceState, SegmentBackward
from disttensor.gradients.reduce import Reduction


class ReduceOrder:
    """The state of one call of autograd.

    reduce(segment)  returns the steps that reduce the gradients of a segment
    bounded          True if reductions need extra memory: few of them run at once
    """

    def __init__(
        self, id: int, reduce: Callable[[Segment], list[Reduction]], bounded: bool
    ) -> None:
        self.id, self.reduce, self.bounded = id, reduce, bounded
        self.keeps_graph = torch.is_grad_enabled()  # create_graph=True
        self.planned: dict[Segment, SegmentBackward] = {}
        self.entered: dict[Segment, SegmentBackward] = {}
        self.together: set[int] = set()  # ``companions`` that are in ``order``, by identity
        self.order: list[tuple[int, int, Segment]] = []  # a heap: the segments to start next
        self.running: deque[tuple[Reduction, Work[Any]]] = deque()

    def of(self, segment: Segment) -> SegmentBackward:
        if segment not in self.planned:
            self.planned[segment] = SegmentBackward(segment.last)
        return self.planned[segment]

    def plan(self, segment: Segment) -> None:
        """Counts a forward of the segment that the backward will enter and leave."""
        self.of(segment).to_leave += 1

    def begin(self, segment: Segment) -> None:
        if segment not in self.entered:
            self.entered[segment] = self.of(segment)
            companions = self.of(segment).companions
            if id(companions) not in self.together:
                self.together.add(id(companions))
                self._enqueue(companions)
            if segment not in companions:
                self._enqueue([segment])

    def _enqueue(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            heapq.heappush(self.order, (-segment.position, segment.index, segment))

    def record_gradient(self, segment: Segment, leaf: int) -> None:
        """Records that a leaf has its gradient."""
        self.begin(segment)
        one = self.entered[segment]
        one.arrived.add(leaf)
        if one.state in (ReduceState.REDUCING, ReduceState.LATE):
            one.state = ReduceState.LATE
            return
        if one.expected and len(one.arrived) >= len(one.expected) and one.expected <= one.arrived:
            self._launch(one)

    def leave(self, segment: Segment, launch: bool) -> None:
        """Leaves a forward. The first backward does not know the number of gradients: all have
        arrived when it has left every forward, unless ``launch`` is False."""
        one = self.of(segment)
        one.to_leave -= 1
        is_waiting = one.state in (ReduceState.COLLECTING, ReduceState.READY)
        if launch and is_waiting and not one.expected and not one.to_leave:
            self._launch(one)

    def _launch(self, ready: SegmentBackward) -> None:
        """Starts the segments that are ready, in order."""
        ready.state = ReduceState.READY
        while self.order:
            segment = self.order[0][-1]
            state = self.of(segment).state
            if state is ReduceState.COLLECTING:
                break
            if state is ReduceState.READY:
                self.start(segment)
            heapq.heappop(self.order)

    def start(self, segment: Segment) -> None:
        self.of(segment).state = ReduceState.REDUCING
        most = segment.options.most_reductions
        while self.running and (
            self.running[0][1].done() or (self.bounded and len(self.running) >= most)
        ):
            self._resume()
        for steps in self.reduce(segment):
            self._advance(steps)

    def in_order(self) -> list[Segment]:
        """Returns the entered segments in the order that all ranks share."""
        return sorted(self.entered, key=lambda s: (-s.position, s.index))

    def finish(self) -> None:
        """Ends the backward: starts the remaining reductions, and waits for all."""
        last_first = self.in_order()
        for segment in last_first:
            if self.entered[segment].state in (ReduceState.COLLECTING, ReduceState.READY):
                self.start(segment)
        self.drain()
        for segment in last_first:
            late = self.entered[segment].state is ReduceState.LATE
            for steps in self.reduce(segment) if late else ():
                self._advance(steps)
        self.drain()
        came = dict.fromkeys(s for s, one in self.entered.items() if one.arrived and not s.copied)
        for segment in came:
            self.entered[segment].companions = came

    def drain(self) -> None:
        """Finishes started reductions, also after an error. Some may be over, depending on the
        rank; gradients must not depend on it."""
        while self.running:
            self._resume()

    def _resume(self) -> None:
        steps, work = self.running.popleft()
        work.wait()
        self._advance(steps)

    def _advance(self, steps: Reduction) -> None:
        work = next(steps, None)
        if work is not None:
            self.running.append((steps, work))
