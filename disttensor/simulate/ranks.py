"""Running ranks one after the other: the first with all micro-batches, the others with few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disttensor.simulate.equal_micro_batches import filled
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.kinds import Differences
from disttensor.simulate.one_rank import Program, compare, run_rank
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.recorder import Values

_PEAK = 0.005  # of the peak of memory: as much it may be off


class Ranks:
    """``run(rank)`` gives what a rank does, and what that shows. The first is run with all of its
    micro-batches; where they are alike on it, ``few`` of them are run on the others, and the rest
    follows. ``set_aside()`` is called before each."""

    def __init__(
        self, program: Program, world: int, values: Values, ranks_per_node: int, backend: str
    ) -> None:
        self.program, self.world, self.values = program, world, values
        self.ranks_per_node, self.backend = ranks_per_node, backend
        self.few: bool | None = None  # not known yet
        self.set_aside: Callable[[], None] = lambda: None

    def __call__(self, rank: int) -> tuple[RankRun, Differences]:
        if self.few:
            run, found = self._run(rank, few=True)
            try:
                return filled(run), found
            except (ValueError, KeyError):
                pass  # this stage has to run them all
        run, found = self._run(rank)
        if self.few is None:
            self.few = run.repeats
        return run, found

    def _run(self, rank: int, few: bool = False) -> tuple[RankRun, Differences]:
        self.set_aside()
        return run_rank(
            self.program, rank, self.world, self.values, self.ranks_per_node, self.backend, few
        )

    def check(self, members: Sequence[int], first: int, run: RankRun) -> bool:
        """Does the last of the ``members`` of a kind do what ``first`` did? False where it does not
        because only few micro-batches were run. Raises SimulationError where the program asks which
        rank it is."""
        others = [r for r in members if r != first]
        if not others and not self.few:
            return True
        other, _ = self(others[-1] if others else first)
        try:
            compare(run, other)
        except SimulationError:
            if not self.few:
                raise
            return False
        off = abs(run.memory.peak - other.memory.peak)
        return not self.few or off <= _PEAK * run.memory.peak
