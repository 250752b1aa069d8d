"""Measures real steps of single ranks, whose transfers are answered at once: the seconds that ranks
compute between their transfers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disttensor.checks import argument_error, check_callable, check_int, check_sequence, is_int
from disttensor.pytree import collect
from disttensor.simulate.child import Child
from disttensor.simulate.events import Event
from disttensor.simulate.fake_collectives import FakeCollectives
from disttensor.simulate.scratch_files import ScratchFiles
from disttensor.simulate.stand_ins import replace_functions
from disttensor.simulate.world import fake, simulated_rank
from disttensor.torch_private import replace_collectives, unboxed_group

Spent = tuple[tuple[str, float], ...]
_WARM = 2  # steps before the measured ones: the first two make plans and buffers
_NOISE = 0.02  # standard deviation of the elements of a received tensor


@dataclass(frozen=True)
class Measured:
    """The measured steps of some ranks. ``ranks``: for each rank its transfers and waits in order,
    by the names of their events, each with the seconds that the rank computes before it. The last
    name is "end"."""

    ranks: Mapping[int, Spent]


def measure(
    build: Callable[[], Callable[[], Any]], world: int, ranks: Iterable[int] = (0,), steps: int = 5
) -> Measured:
    """Measures training steps of some of ``world`` ranks on the CPU of this machine, for
    ``simulate(measured=...)``.

    Each rank runs in a forked process, with one thread, on tensors with data. Its transfers are
    answered at once: a gathered tensor repeats the rank's own piece, and a received one holds
    noise. The CPU seconds between the transfers are measured, of kernels and of Python. Meanwhile
    the other cores run the same rank, because ranks on one machine compete for caches and memory.
    Like a simulated rank, a measured one changes nothing of this process and no files.

    Args:
        build: as for ``simulate``.
        world: the number of ranks.
        ranks: the ranks that run, for example one of each kind:
            ``[kind.rank for kind in report.kinds]``. Each needs the memory of a real rank.
        steps: the number of measured steps, after two others. The median counts.

    Returns:
        A Measured. ``measured.ranks`` has for each rank its transfers and waits in order, each with
        the seconds that the rank computes before it.

    Raises:
        Exception: any exception of the program, and SimulationError as from ``simulate``.

    >>> def build():
    ...     mesh = dt.init_mesh((2,), ("dp",))
    ...     def step():
    ...         x = dt.ones(8, mesh=mesh, placements=[dt.Shard(0)])
    ...         dt.reshard(x * x, mesh, [dt.Replicate()]).exp()
    ...     return step
    >>> measured = dt.simulate.measure(build, world=2)
    >>> [name for name, seconds in measured.ranks[0]]
    ['Collective', 'Wait', 'end']
    """
    check_callable("measure: build", build, "a function that returns a function")
    check_int("measure: world", world, 1, "a number of ranks")
    check_int("measure: steps", steps, 1, "a number of steps")
    chosen = check_ranks("measure", ranks, world)
    fake()  # imports that take seconds are made here, and not in each child
    return Measured({rank: _beside_others(build, rank, world, steps) for rank in chosen})


def check_ranks(who: str, ranks: Iterable[int], world: int) -> tuple[int, ...]:
    """Returns ``ranks`` as a tuple. Raises TypeError or ValueError unless they are of the world."""
    expected = f"a list of ranks from 0 to {world - 1}"
    chosen = check_sequence(f"{who}: ranks", ranks, expected)
    for rank in chosen:
        if not is_int(rank) or not 0 <= rank < world:
            raise argument_error(f"{who}: ranks: entry", rank, expected, ValueError)
    if not chosen:
        raise argument_error(f"{who}: ranks", chosen, expected, ValueError)
    return chosen


def _beside_others(build: Callable[[], Any], rank: int, world: int, steps: int) -> Spent:
    """Returns the step of a rank while the other cores run the same rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    limits = [sys.maxsize] * (min(cores, world) - 1)
    children = [_start(build, rank, world, n) for n in (*limits, steps)]
    try:
        return children[-1].result()
    finally:
        for child in children:
            child.end()


def _start(build: Callable[[], Any], rank: int, world: int, steps: int) -> Child[Spent]:
    def run(files: ScratchFiles) -> Spent:
        with simulated_rank(rank, world, world, "gloo", data=True):
            replace_functions(files, rank, world)
            watch = _Stopwatch()
            kept = replace_collectives(watch.answer)
            step = build()
            for _ in range(_WARM):
                step()
            spent = [watch.spent(step) for _ in range(steps)]
            del kept
        return sorted(spent, key=lambda one: sum(seconds for _, seconds in one))[steps // 2]

    return Child(run, f"rank {rank}", tuple)


class _Stopwatch:
    """Answers the transfers of a rank, and records the CPU seconds of this process between them."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []
        self.begin: float | None = None  # None: a transfer is being answered
        self.seconds = 0.0
        self.collectives = FakeCollectives(self._note, lambda: "")

    def spent(self, step: Callable[[], Any]) -> Spent:
        """Runs a step, and returns its transfers and waits with the seconds before each."""
        self.found, self.seconds = [], 0.0
        self._resume()
        step()
        self._end("end")
        return tuple(self.found)

    def answer(self, func: Any, *args: Any) -> Any:
        """Returns the result of an operator of ``torch.ops.c10d``."""
        self._pause()
        with torch.no_grad():
            out = self.collectives.answer(func, args, {}, None)
            _fill(func._schema.name, args)
        self._resume()
        return out

    def _note(self, event: Event) -> None:
        running = self.begin is not None
        self._end(type(event).__name__)
        if running:
            self._resume()

    def _end(self, name: str) -> None:
        self._pause()
        self.found.append((name, self.seconds))
        self.seconds = 0.0

    def _pause(self) -> None:
        if self.begin is not None:
            self.seconds += time.process_time() - self.begin
            self.begin = None

    def _resume(self) -> None:
        self.begin = time.process_time()


def _fill(name: str, args: Any) -> None:
    """Fills the results of a transfer with the data that this rank gives, or else with noise. New
    memory may hold numbers with which kernels take longer, or without which no update is made."""
    given: list[torch.Tensor] = collect(args[1:], [])
    if not given and not name.endswith(("recv_", "recv_any_source_", "broadcast_")):
        return  # it reduces in place, or it sends
    if name.endswith("broadcast_") and unboxed_group(args[1]).rank() == args[2]:
        return  # this rank sends
    for out in collect(args[:1], []):
        if given:
            source = given[0].reshape(-1)
            for part in out.view(-1).split(max(source.numel(), 1)):
                part.copy_(source[: part.numel()])
        elif out.is_floating_point():
            out.normal_(0.0, _NOISE)
        else:
            out.zero_()
