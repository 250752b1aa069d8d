"""What one rank does in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from disttensor.comm.log import CommRecord
from disttensor.simulate.events import Event
from disttensor.simulate.few_micro_batches import left_out
from disttensor.simulate.layers import Placed
from disttensor.simulate.memory import Held, Memory, Step, summary
from disttensor.simulate.visits import Piece, PipelineRun


@dataclass(frozen=True)
class RankRun:
    """What ``rank`` did in the step. ``held``: bytes by category when it begins; ``changes``: of
    its memory, in which lower numbers than ``blocks_before`` are of blocks that were there before;
    ``warnings``: of its program; ``parts``: the step cut into forwards and backwards; ``placed``:
    the layers on each mesh."""

    rank: int
    events: list[Event]
    comms: list[CommRecord]
    held: Held
    changes: list[Step]
    warnings: list[str]
    parts: tuple[Piece, ...]
    runs: list[PipelineRun]
    blocks_before: int = 0
    placed: Placed = field(default_factory=dict)

    @property
    def stage(self) -> int | None:
        """The number of its stage in the first pipeline run."""
        grids = self.runs[0].grids if self.runs else ()
        return next((s for s, grid in enumerate(grids) if self.rank in grid.ranks), None)

    @property
    def repeats(self) -> bool:
        """Do few of its micro-batches show what all of them do?"""
        found = [left_out(run.orders[run.stage]) for run in self.runs if run.grids]
        return any(found) and all(run.alike for run in self.runs if run.grids)

    def level(self) -> Held:
        """Bytes by category when the step ends."""
        out = dict(self.held)
        for step in self.changes:
            out[step.category] += step.nbytes
        return out

    @cached_property
    def memory(self) -> Memory:
        return summary(self.held, self.changes)
