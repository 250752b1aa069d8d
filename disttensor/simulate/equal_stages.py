"""Stages that do the same: the first and the last of them are run, those between follow.

Stages with the same parameters, whose modules make the same calls, do the same for a micro-batch,
in the order that the schedule says. What is not the same are names of layers, and numbers of ranks
and of messages, which differ by as much from each stage to the next. So what a stage between two
does follows from the two. As a check the last follows from the first in the same way: where its run
says otherwise, in any event or in its peak of memory, one of the two is by itself, as a stage at an
end often is, and those between are tried without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from disttensor.comm.log import CommRecord
from disttensor.simulate.events import Collective, Event, Gradient, Message, Op, Visit, Wait
from disttensor.simulate.grid import Grid
from disttensor.simulate.layers import counterparts, renamed
from disttensor.simulate.memory import Step
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.visits import Mark, Piece

_PEAK = 0.005  # of the peak of memory: as much it may be off
Label = tuple[int, Any]


@dataclass(frozen=True)
class Follower:
    """``rank`` of stage number ``stage`` does what ``first`` and ``last`` do, at the same places of
    the stages ``ends``. ``suspect``: the end that is by itself if the two are not alike."""

    rank: int
    stage: int
    first: int
    last: int
    ends: tuple[int, int]
    suspect: int = 0

    def at(self, a: int, b: int) -> int:
        """What is here where the first stage has ``a`` and the last ``b``. Raises ValueError if
        they do not differ by as much from each stage to the next."""
        steps = self.ends[1] - self.ends[0]
        if (b - a) % steps:
            raise ValueError(f"{a} and {b}, {steps} stages later")
        return a + (b - a) // steps * (self.stage - self.ends[0])


def followers(
    stages: Iterable[tuple[Grid, ...]], work: Mapping[tuple[int, ...], Any],
    kinds: Sequence[Sequence[int]], odd: Collection[int] = (),
) -> list[Follower]:  # fmt: skip
    """The kinds that follow from others. ``work``: what each mesh is known to do; ``odd``: stages
    that do something else."""
    orders = list(stages)
    if len(orders) != 1 or len(orders[0]) < 5:
        return []
    (grids,) = orders
    stage_of = {rank: (s, i) for s, grid in enumerate(grids) for i, rank in enumerate(grid.ranks)}
    at: dict[tuple[int, frozenset[int]], int] = {}  # (stage, places) -> the first rank
    for ranks in kinds:
        there = [stage_of.get(r) for r in ranks]
        found = {t[0] for t in there if t is not None}
        if len(found) == 1 and None not in there:
            at[found.pop(), frozenset(t[1] for t in there if t is not None)] = ranks[0]
    same: list[list[int]] = []
    for s in range(1, len(grids) - 1):
        known = work.get(grids[s].ranks)
        for group in same:
            other = grids[group[0]]
            if known and other.shape == grids[s].shape and work.get(other.ranks) == known:
                group.append(s)
                break
        else:
            same.append([s])
    out = []
    for group in same:
        left = [s for s in group if s not in odd]
        for s in left[1:-1]:
            # the last one first, which sends to another stage, then in turn
            first, last = left[0], left[-1]
            suspect = first if (len(group) - len(left)) % 2 else last
            for (stage, places), rank in at.items():
                if stage == s and (first, places) in at and (last, places) in at:
                    ends = at[first, places], at[last, places]
                    out.append(Follower(rank, s, *ends, (first, last), suspect))
    return out


def alike(first: RankRun, last: RankRun, follower: Follower) -> bool:
    """Does the last stage do what follows from the first?"""
    there = replace(follower, rank=last.rank, stage=follower.ends[1])
    try:
        check = followed(first, last, there)
    except (ValueError, KeyError):
        return False
    off = abs(check.memory.peak - last.memory.peak)
    return off <= _PEAK * last.memory.peak and _same(check, last)


def _same(check: RankRun, last: RankRun) -> bool:
    """Does the last of the stages do what was expected of it?"""
    mine, its = _works(check), _works(last)
    return check.comms == last.comms and len(check.events) == len(last.events) and all(
        (type(a) is Wait and type(b) is Wait and mine.get(a.work) == its.get(b.work))
        or _without_work(a) == _without_work(b)
        for a, b in zip(check.events, last.events, strict=True)
    )  # fmt: skip


def _works(run: RankRun) -> dict[int, int]:
    """Where each work was started."""
    return {e.work: i for i, e in enumerate(run.events) if isinstance(e, Collective | Message)}


def _without_work(e: Event) -> Event:
    if isinstance(e, Collective):  # a process group has another name on each stage
        return e._replace(work=0, group="")
    return e._replace(work=0) if isinstance(e, Message) else e


def followed(first: RankRun, last: RankRun, follower: Follower) -> RankRun:
    """The pieces of ``first`` in the order of the follower's stage, with its layers, and numbers
    between those of the two. Raises ValueError where they are not alike."""
    mine, its = _labelled(first), _labelled(last)
    if mine.keys() != its.keys():
        raise ValueError("not the same pieces")
    events: list[Event] = []
    comms: list[CommRecord] = []
    changes: list[Step] = []
    parts: list[Piece] = []
    count: Counter[str] = Counter()
    layer = _layers(first, follower)
    for label in _order(first, follower.stage):
        a, b = mine[label], its[label]
        start = Mark(len(events), len(changes), len(comms))
        shift = len(events) - a.start.events
        for x, y in zip(_cut(first.events, a, 0), _cut(last.events, b, 0), strict=True):
            events.append(_event(x, y, follower, count, layer))
        for step in _cut(first.changes, a, 1):
            changes.append(step._replace(event=step.event + shift) if shift else step)
        for one, other in zip(_cut(first.comms, a, 2), _cut(last.comms, b, 2), strict=True):
            comms.append(_record(one, other, follower))
        end = Mark(len(events), len(changes), len(comms))
        parts.append(Piece(a.run, a.action, start, end))
    return RankRun(follower.rank, events, comms, first.held, changes, [], tuple(parts), first.runs)


def _labelled(run: RankRun) -> dict[Label, Piece]:
    return {(p.run, p.action): p for p in run.parts}


def _order(run: RankRun, stage: int) -> list[Label]:
    """The pieces of a stage in its order."""
    out: list[Label] = []
    for piece in run.parts:
        if piece.action is None:
            out.append((piece.run, None))
            if piece.run < len(run.runs):
                out += [(piece.run, action) for action in run.runs[piece.run].orders[stage]]
    return out


def _cut(rows: Sequence[Any], piece: Piece, of: int) -> Sequence[Any]:
    return rows[piece.start[of] : piece.end[of]]


def _layers(first: RankRun, follower: Follower) -> Callable[[str], str]:
    """What a layer of the first stage is called on the follower's."""
    grids = first.runs[0].grids
    mine, its = (first.placed.get(grids[s].ranks, []) for s in (follower.ends[0], follower.stage))
    return cache(partial(renamed, names=counterparts(mine, its)))


def _event(
    a: Event, b: Event, follower: Follower, count: Counter[str], layer: Callable[[str], str]
) -> Event:
    if isinstance(a, Op) and isinstance(b, Op):
        if a._replace(layer=b.layer) != b:
            raise ValueError(f"{a} and {b}")
        return a._replace(layer=layer(a.layer)) if a.layer else a
    if isinstance(a, Message) and isinstance(b, Message):
        return a._replace(peer=follower.at(a.peer, b.peer), tag=follower.at(a.tag, b.tag))
    if isinstance(a, Collective) and isinstance(b, Collective):
        ranks = tuple(map(follower.at, a.ranks, b.ranks))
        count[a.group] += 1
        return a._replace(ranks=ranks, number=count[a.group] - 1)
    if type(a) is not type(b) or not isinstance(a, Wait | Visit | Gradient):
        raise ValueError(f"{a} and {b}")
    return a


def _number(a: str, b: str, at: Callable[[int, int], int]) -> str:
    """The name of a process group, which may be a number. Raises ValueError for others."""
    return str(at(int(a), int(b)))


def _record(a: CommRecord, b: CommRecord, follower: Follower) -> CommRecord:
    if a == b:
        return a
    ends = zip(a.axis.split(" -> "), b.axis.split(" -> "), strict=True)
    axis = " -> ".join(_number(x, y, follower.at) for x, y in ends)
    if replace(b, axis=a.axis) != a:
        raise ValueError(f"{a} and {b}")
    return replace(a, axis=axis)
