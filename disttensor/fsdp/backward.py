"""One backward: reductions start when the last gradient of a segment has come, and run beside the
rest of the backward.

All ranks start them in one order, that of the segments' forwards read backwards: a segment that is
ready waits for those that the backward has entered and that come before it. What is not complete
when the backward ends is reduced then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from disttensor.comm import collectives
from disttensor.fsdp.graph_hooks import Pass
from disttensor.fsdp.reduce import Steps
from disttensor.fsdp.segment import Segment
from disttensor.torch_private import after_backward, current_backward

_MOST = 2  # reductions to shards under way at once: each holds the gradients of a segment


class Backward:
    """The state of one call of autograd.

    reduce(segment)  starts nothing, and gives what reduces the gradients of a segment
    bounded          reductions hold memory of their own
    """

    def __init__(
        self, number: int, reduce: Callable[[Segment], list[Steps]], bounded: bool
    ) -> None:
        self.number, self.reduce, self.bounded = number, reduce, bounded
        self.passes: dict[Segment, dict[Pass, None]] = {}
        self.came: dict[Segment, set[int]] = {}  # leaves that have their gradient
        self.waiting: dict[Segment, set[int]] = {}  # leaves that had one last time, and not yet now
        self.ready: set[Segment] = set()
        self.launched: set[Segment] = set()
        self.late: set[Segment] = set()
        self.running: deque[tuple[Steps, collectives.Pending]] = deque()

    def enter(self, one: Pass) -> bool:
        """True for the first time."""
        self.begin(one.segment)
        passes = self.passes[one.segment]
        if one in passes:
            return False
        passes[one] = None
        one.left = 0
        return True

    def again(self, segment: Segment) -> None:
        """A forward of the segment was computed again. Where the backward has not come to it yet,
        it is gathered later."""
        if segment not in self.passes:
            segment.free()

    def begin(self, segment: Segment) -> None:
        if segment not in self.passes:
            self.passes[segment] = {}
            self.came[segment] = set()
            self.waiting[segment] = set(segment.expected)

    def arrived(self, segment: Segment, leaf: int) -> list[Segment]:
        """A leaf has its gradient. Gives the segments whose reduction has started now."""
        self.begin(segment)
        self.came[segment].add(leaf)
        if segment in self.launched:
            self.late.add(segment)
            return []
        waiting = self.waiting[segment]
        waiting.discard(leaf)
        if waiting or not segment.expected:
            return []
        self.ready.add(segment)
        return self.launch()

    def leave(self, segment: Segment) -> list[Segment]:
        """A pass was left. In the first backward nothing tells how many gradients will come: all
        that will have come then."""
        if segment.expected or segment in self.launched or not self._left(segment):
            return []
        self.ready.add(segment)
        return self.launch()

    def _left(self, segment: Segment) -> bool:
        """Has the backward left all that the forward made, through the inputs? Then its nodes have
        run: they are the younger ones. Of a pass without such inputs that is not known."""
        passes = self.passes[segment]
        return bool(passes) and all(
            one.inputs and one.over and all(other in passes for other in one.beside)
            for one in passes
        )

    def launch(self) -> list[Segment]:
        """Start what is ready, in order."""
        started = []
        while rest := [s for s in self.passes if s not in self.launched]:
            segment = max(rest, key=lambda s: s.position)
            if segment not in self.ready:
                break
            self.start(segment)
            started.append(segment)
        return started

    def start(self, segment: Segment) -> None:
        self.launched.add(segment)
        while self.running and (
            self.running[0][1].done() or (self.bounded and len(self.running) >= _MOST)
        ):
            self._resume()
        for steps in self.reduce(segment):
            self._go_on(steps)

    def done_with(self, segment: Segment) -> bool:
        """Have all nodes run that need the parameters of the segment?"""
        if self._left(segment):
            return True
        return (
            segment in self.launched
            and segment.ever <= self.came[segment]
            and all(one.over for one in self.passes[segment])
        )

    def finish(self) -> None:
        """At the end of the backward: the rest, and wait for everything."""
        for segment in sorted(self.passes, key=lambda s: -s.position):
            if segment not in self.launched:
                self.start(segment)
        while self.running:
            self._resume()
        for segment in sorted(self.late, key=lambda s: -s.position):
            for steps in self.reduce(segment):
                self._go_on(steps)
        while self.running:
            self._resume()
        for segment, came in self.came.items():
            segment.expected = frozenset(came)
            segment.ever |= came

    def abandon(self) -> None:
        """The backward ended with an error: wait for what is under way, and forget it."""
        while self.running:
            steps, pending = self.running.popleft()
            steps.close()
            pending.wait()

    def _resume(self) -> None:
        steps, pending = self.running.popleft()
        pending.wait()
        self._go_on(steps)

    def _go_on(self, steps: Steps) -> None:
        pending = next(steps, None)
        if pending is not None:
            self.running.append((steps, pending))


def number() -> int:
    """Of the backward that this code runs in; -1 outside."""
    return current_backward()


def at_the_end(run: Callable[[], Any]) -> None:
    """Run this when the present backward has run all its nodes."""
    after_backward(run)
