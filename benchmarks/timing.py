"""An interleaved timer: contestants take turns (A B C A B C ...), so that noise hits them alike.

CPU time of the process is counted, not the clock on the wall: nothing that is timed here waits, and
what other processes take away on a busy machine is not its cost.
"""

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fresh:
    """A call that must never see the same input twice: ``prepare`` makes one, untimed."""

    prepare: Callable[[], Any]
    call: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.call(self.prepare())


Call = Callable[[], Any] | Fresh
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``repeats`` slices of about ``slice_s`` seconds for each contestant."""

    repeats: int
    slice_s: float
    fresh: int  # calls in a slice of a Fresh


FULL = Effort(repeats=15, slice_s=0.04, fresh=24)
QUICK = Effort(repeats=5, slice_s=0.01, fresh=8)


def best_times(
    calls: Mapping[str, Call], effort: Effort, around: Mapping[str, Around] | None = None
) -> dict[str, float]:
    """CPU seconds per call of each contestant: the best of ``effort.repeats`` interleaved slices.

    Every call is warmed up first, and a slice holds as many calls as fill ``effort.slice_s``.
    The garbage collector runs between slices, never inside one. ``around``: what the slices of a
    contestant run in.
    """
    best = dict.fromkeys(calls, float("inf"))
    inside = {name: (around or {}).get(name, nullcontext) for name in calls}
    gc.collect()
    gc.freeze()  # what exists by now is not looked at again: the collections below are short
    try:
        counts = {}
        for name, call in calls.items():
            with inside[name]():
                counts[name] = _calls_per_slice(call, effort)
        for _ in range(effort.repeats):
            for name, call in calls.items():
                with inside[name]():
                    best[name] = min(best[name], _slice(call, counts[name]) / counts[name])
    finally:
        gc.unfreeze()
    return best


def _calls_per_slice(call: Call, effort: Effort) -> int:
    """As many calls as take ``slice_s``, found by doubling; this is the warm-up too."""
    if isinstance(call, Fresh):
        _slice(call, 3)
        return effort.fresh
    _slice(call, 3)
    count = 1
    while (seconds := _slice(call, count)) < effort.slice_s / 2:
        count *= 2
    return max(1, round(count * effort.slice_s / seconds))


def _slice(call: Call, count: int) -> float:
    """Seconds for ``count`` calls in a row, without garbage collection."""
    gc.collect()
    if isinstance(call, Fresh):
        inputs = [call.prepare() for _ in range(count)]
        return _timed(lambda fn=call.call: [fn(x) for x in inputs])

    def loop() -> None:
        for _ in range(count):
            call()

    return _timed(loop)


def _timed(loop: Callable[[], Any]) -> float:
    gc.disable()
    try:
        start = time.process_time()
        loop()
        return time.process_time() - start
    finally:
        gc.enable()
