"""Several backwards that add up: what they reached, and what waits for the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from disttensor.autograd.accumulation import Window
from disttensor.fsdp.backward import Backward
from disttensor.fsdp.reduce import Steps
from disttensor.fsdp.segment import Segment


class Accumulation:
    """The state between the backwards of one accumulation.

    owing  segments whose gradients wait for the last micro-batch; ``reduce`` is what reduces those
    of one completely first  the parameters that the first backward reached
    """

    def __init__(self, reduce: Callable[[Segment], list[Steps]]) -> None:
        self.reduce = reduce
        self.owing: dict[Segment, None] = {}
        self.first: frozenset[str] | None = None

    def __bool__(self) -> bool:
        return bool(self.owing or self.first)

    def begin_anew(self) -> None:
        self.first = None
        self.owing.clear()

    def after(self, now: Backward, window: Window) -> None:
        """A backward is over. Raises RuntimeError where it reached other parameters than the first
        one."""
        if not window.last:
            self.owing.update(dict.fromkeys(now.passes))
            for twin in [t for s in now.passes for t in s.apart]:
                if twin.spec.dtype is not twin.held.dtype and twin.collected():
                    twin.lay_by(twin.held.dtype)
        elif window.counted:
            self.pay([s for s in self.owing if s not in now.passes])
        for segment in now.passes if window.last else ():
            self.owing.pop(segment, None)
        if window.counted:
            reached = frozenset(s.leaves[leaf] for s, came in now.came.items() for leaf in came)
            first, self.first = self.first, None if window.last else self.first or reached
            if first is not None and first != reached:
                self.first = None
                raise RuntimeError(
                    "accumulate: this micro-batch gave gradients to other parameters than the "
                    f"first one: {_some(reached - first)} only here, {_some(first - reached)} only "
                    "there. The gradients so far are a sum of unlike parts: zero_grad(), and let "
                    "every micro-batch of an accumulation use the same parameters (or call "
                    "backward without accumulate)"
                )

    def pay(self, segments: Iterable[Segment]) -> None:
        """Reduce what waits for a last micro-batch, which did not come, or did not come by here."""
        for segment in list(segments):
            for steps in self.reduce(segment):
                for pending in steps:
                    pending.wait()
            self.owing.pop(segment, None)

    def flush(self) -> None:
        """The gradients are about to be read."""
        self.pay(self.owing)
        self.first = None


def _some(names: frozenset[str]) -> str:
    few = sorted(names)[:3]
    return (", ".join(few) + (", ..." if len(names) > 3 else "")) or "none"
