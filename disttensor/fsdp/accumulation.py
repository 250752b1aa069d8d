"""Gradient accumulation over several backwards: segments whose reduction waits for the last one.

Micro-batches may reach different parameters. A segment that the last backward does not reach is
reduced when its ``accumulate`` ends, on all ranks in the order of definition.
"""

from __future__ import annotations

from collections.abc import Callable

from disttensor.autograd.accumulation import BackwardContext
from disttensor.fsdp.backward import ReduceOrder
from disttensor.fsdp.reduce import Reduction
from disttensor.fsdp.segment import Segment


class Accumulation:
    """The state between the backwards of one accumulation.

    deferred  segments whose gradients wait for the last micro-batch; ``reduce`` reduces the
              gradients of one segment completely
    """

    def __init__(self, reduce: Callable[[Segment], list[Reduction]]) -> None:
        self.reduce = reduce
        self.deferred: set[Segment] = set()

    def after(self, backward: ReduceOrder, context: BackwardContext) -> None:
        """Updates the deferred segments after a backward."""
        if context.is_last:
            self.deferred.difference_update(backward.entered)
            return
        self.deferred.update(backward.entered)
        for param in [p for s in backward.entered for p in s.copied]:
            if param.collects:
                param.collect()

    def flush(self) -> None:
        """Reduces the deferred segments, when the accumulation ends or gradients are about to be
        read."""
        for segment in sorted(self.deferred, key=lambda s: s.index):
            for steps in self.reduce(segment):
                for work in steps:
                    work.wait()
            self.deferred.discard(segment)
