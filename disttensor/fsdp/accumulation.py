"""Several backwards that add up: what they reached, and what is deferred to the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from disttensor.autograd.accumulation import BackwardContext
from disttensor.fsdp.backward import Backward
from disttensor.fsdp.param import FSDPParam
from disttensor.fsdp.reduce import Steps
from disttensor.fsdp.segment import Segment
from disttensor.tensor.base import has_grads


class Accumulation:
    """The state between the backwards of one accumulation.

    deferred  segments whose gradients wait for the last micro-batch; ``reduce`` reduces those of
              one completely
    first     the parameters that the first backward reached
    """

    def __init__(self, reduce: Callable[[Segment], list[Steps]]) -> None:
        self.reduce = reduce
        self.deferred: dict[Segment, None] = {}
        self.first: frozenset[str] | None = None

    def __bool__(self) -> bool:
        return bool(self.deferred or self.first)

    def begin(self, params: Iterable[FSDPParam]) -> None:
        """Before a forward of all: where the gradients so far were dropped, it starts anew."""
        first = self.first or ()
        if not any(p.has_grads() or has_grads(p.sharded_param) for p in params if p.name in first):
            self.first = None

    def after(self, backward: Backward, context: BackwardContext) -> None:
        """After a backward. Raises RuntimeError if it reached other parameters than the first."""
        entered = backward.entered
        if not context.is_last:
            self.deferred.update(dict.fromkeys(entered))
            for param in [p for s in entered for p in s.copied]:
                if param.collects:
                    param.collect()
        elif context.same_params:
            self._reduce([s for s in self.deferred if s not in entered])
        for segment in entered if context.is_last else ():
            self.deferred.pop(segment, None)
        if context.same_params:
            reached = frozenset(
                s.leaves[leaf] for s, came in backward.came.items() for leaf in came
            )
            first, self.first = self.first, None if context.is_last else self.first or reached
            if first is not None and first != reached:
                self.first = None
                raise RuntimeError(
                    "accumulate: this micro-batch gave gradients to other parameters than the "
                    f"first one: {_some(reached - first)} only here, {_some(first - reached)} only "
                    "there. The gradients so far are a sum of unlike parts: zero_grad(), and let "
                    "every micro-batch of an accumulation use the same parameters (or call "
                    "backward without accumulate)"
                )

    def flush(self) -> None:
        """The gradients are about to be read: reduce what waits for a last micro-batch."""
        self._reduce(self.deferred)
        self.first = None

    def _reduce(self, segments: Iterable[Segment]) -> None:
        for segment in list(segments):
            for steps in self.reduce(segment):
                for work in steps:
                    work.wait()
            self.deferred.pop(segment, None)


def _some(names: frozenset[str]) -> str:
    few = sorted(names)[:3]
    return (", ".join(few) + (", ..." if len(names) > 3 else "")) or "none"
