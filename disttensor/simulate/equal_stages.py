"""Derives the ranks of a stage from two equal stages that were run, one before and one after it.

Stages with the same parameters, whose modules make the same calls, do the same for a micro-batch,
in the order that the schedule says. Between consecutive stages only layer names, rank numbers and
message tags change, the numbers by a constant step.

To verify, the last stage is also derived from the first and compared with its recorded run. If they
differ, in any event or in their peaks of memory, one of the two is an outlier (often a stage at an
end); it is excluded, and the stages between are derived again without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from disttensor.comm.log import CommRecord
from disttensor.simulate.events import Collective, Event, Gradient, Message, Op, Visit, Wait
from disttensor.simulate.layers import counterparts, renamed
from disttensor.simulate.rank_run import ActionSlice, Grid, RankRun, StepBuilder

_PEAK = 0.005  # largest difference between two peaks of memory, as a part of the peak
Label = tuple[int, Any]  # a pipeline run and an action


@dataclass(frozen=True)
class DerivedRank:
    """``rank`` of ``stage``, derived from the ranks ``first`` and ``last``, which are at the same
    places of the stages ``ends``. ``suspect``: the stage to exclude if the two differ."""

    rank: int
    stage: int
    first: int
    last: int
    ends: tuple[int, int]
    suspect: int = 0

    def interpolate(self, a: int, b: int) -> int:
        """Returns the number of this stage if the first stage has ``a`` and the last ``b``. Raises
        ValueError if the difference is no multiple of the number of stages between."""
        steps = self.ends[1] - self.ends[0]
        if (b - a) % steps:
            raise ValueError(f"{a} and {b}, {steps} stages later")
        return a + (b - a) // steps * (self.stage - self.ends[0])


def derived_ranks(
    stages: Iterable[tuple[Grid, ...]], work: Mapping[tuple[int, ...], Any],
    kinds: Sequence[Sequence[int]], excluded: Collection[int] = (),
) -> list[DerivedRank]:  # fmt: skip
    """Returns the kinds of ranks that can be derived.

    Args:
        stages: the meshes of the stages, of each pipeline run.
        work: for each mesh, by its ranks, its parameters and the calls of its modules.
        kinds: the ranks of each kind.
        excluded: stages that differ from the others.
    """
    orders = list(stages)
    if len(orders) != 1 or len(orders[0]) < 5:
        return []
    (grids,) = orders
    stage_of = {rank: (s, i) for s, grid in enumerate(grids) for i, rank in enumerate(grid.ranks)}
    first_ranks: dict[tuple[int, frozenset[int]], int] = {}  # (stage, places) -> the first rank
    for ranks in kinds:
        found = [stage_of[r] for r in ranks if r in stage_of]
        numbers = {stage for stage, _ in found}
        if len(numbers) == 1 and len(found) == len(ranks):
            first_ranks[numbers.pop(), frozenset(place for _, place in found)] = ranks[0]
    out = []
    for group in _equal_stages(grids, work):
        left = [s for s in group if s not in excluded]
        # exclude the last stage first, which sends to another stage, then the two in turn
        suspect = (left[-1], left[0])[(len(group) - len(left)) % 2] if left else 0
        for s in left[1:-1]:
            for (stage, places), rank in first_ranks.items():
                ends = first_ranks.get((left[0], places)), first_ranks.get((left[-1], places))
                if stage == s and ends[0] is not None and ends[1] is not None:
                    both = left[0], left[-1]
                    out.append(DerivedRank(rank, s, ends[0], ends[1], both, suspect))
    return out


def _equal_stages(
    grids: Sequence[Grid], work: Mapping[tuple[int, ...], Any]
) -> Iterable[Sequence[int]]:
    """Groups the stages, except the first and the last, by shape and work. A stage of unknown work
    has a group of its own."""
    groups: list[list[int]] = []
    for s in range(1, len(grids) - 1):
        known = work.get(grids[s].ranks)
        for group in groups:
            other = grids[group[0]]
            if known and other.shape == grids[s].shape and work.get(other.ranks) == known:
                group.append(s)
                break
        else:
            groups.append([s])
    return groups


def is_alike(first: RankRun, last: RankRun, rank: DerivedRank) -> bool:
    """Returns True if the last stage does the same as a stage derived from the first."""
    try:
        derived = derive(first, last, replace(rank, rank=last.rank, stage=rank.ends[1]))
    except (ValueError, KeyError):
        return False
    off = abs(derived.memory.peak - last.memory.peak)
    return off <= _PEAK * last.memory.peak and _same(derived, last)


def _same(a: RankRun, b: RankRun) -> bool:
    """Returns True if the two runs have equal events, apart from the numbers of their works."""
    mine, its = _started(a), _started(b)
    return a.comms == b.comms and len(a.events) == len(b.events) and all(
        (type(x) is Wait and type(y) is Wait and mine.get(x.work) == its.get(y.work))
        or _without_work(x) == _without_work(y)
        for x, y in zip(a.events, b.events, strict=True)
    )  # fmt: skip


def _started(run: RankRun) -> dict[int, int]:
    """Returns the number of the event that starts each work."""
    return {e.work: i for i, e in enumerate(run.events) if isinstance(e, Collective | Message)}


def _without_work(e: Event) -> Event:
    if isinstance(e, Collective):  # a process group has another name on each stage
        return e._replace(work=0, group="")
    return e._replace(work=0) if isinstance(e, Message) else e


def derive(first: RankRun, last: RankRun, rank: DerivedRank) -> RankRun:
    """Returns the slices of ``first`` in the order of the derived rank's stage, with its layers and
    its numbers. Raises ValueError if the two are not alike."""
    mine, its = _by_label(first), _by_label(last)
    if mine.keys() != its.keys():
        raise ValueError("the two stages have different actions")
    like = replace(first, rank=rank.rank, warnings=[], blocks_before=0, layers={})
    builder, count, rename = StepBuilder(like), Counter[str](), _layer_names(first, rank)
    for label in _order(first, rank.stage):
        (events, changes, comms), (its_events, _, its_comms) = (
            first.cut(mine[label]), last.cut(its[label]),
        )  # fmt: skip
        pairs = zip(events, its_events, strict=True)
        builder.add(
            mine[label], mine[label].action,
            [_event(x, y, rank, count, rename) for x, y in pairs], changes,
            [_record(x, y, rank) for x, y in zip(comms, its_comms, strict=True)],
        )  # fmt: skip
    return builder.build()


def _by_label(run: RankRun) -> dict[Label, ActionSlice]:
    return {(part.run, part.action): part for part in run.slices}


def _order(run: RankRun, stage: int) -> list[Label]:
    """Returns the labels of the slices of a stage, in order."""
    out: list[Label] = []
    for part in run.slices:
        if part.action is None:
            out.append((part.run, None))
            if part.run < len(run.runs):
                out += [(part.run, action) for action in run.runs[part.run].orders[stage]]
    return out


def _layer_names(first: RankRun, rank: DerivedRank) -> Callable[[str], str]:
    """Returns a function from a layer of the first stage to its counterpart on the derived
    stage."""
    grids = first.runs[0].grids
    mine, its = (first.layers.get(grids[s].ranks, []) for s in (rank.ends[0], rank.stage))
    return cache(partial(renamed, names=counterparts(mine, its)))


def _event(
    a: Event, b: Event, rank: DerivedRank, count: Counter[str], rename: Callable[[str], str]
) -> Event:
    if isinstance(a, Op) and isinstance(b, Op):
        if a._replace(layer=b.layer) != b:
            raise ValueError(f"{a} and {b}")
        return a._replace(layer=rename(a.layer)) if a.layer else a
    if isinstance(a, Message) and isinstance(b, Message):
        peer, tag = rank.interpolate(a.peer, b.peer), rank.interpolate(a.tag, b.tag)
        return a._replace(peer=peer, tag=tag)
    if isinstance(a, Collective) and isinstance(b, Collective):
        ranks = tuple(map(rank.interpolate, a.ranks, b.ranks))
        count[a.group] += 1
        return a._replace(ranks=ranks, number=count[a.group] - 1)
    if type(a) is not type(b) or not isinstance(a, Wait | Visit | Gradient):
        raise ValueError(f"{a} and {b}")
    return a


def _record(a: CommRecord, b: CommRecord, rank: DerivedRank) -> CommRecord:
    """Raises ValueError if the axes differ and are no numbers."""
    if a == b:
        return a
    ends = zip(a.axis.split(" -> "), b.axis.split(" -> "), strict=True)
    axis = " -> ".join(str(rank.interpolate(int(x), int(y))) for x, y in ends)
    if replace(b, axis=a.axis) != a:
        raise ValueError(f"{a} and {b}")
    return replace(a, axis=axis)
