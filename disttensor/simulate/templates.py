"""Builds the step of a rank from templates: the recorded parts of similar steps.

A recorded part names its storages and works by the action that made them. So it fits wherever its
action stands in a schedule, and the step of a rank follows from the order of its stage.

*Equal micro-batches*: an action depends on its neighbours in the schedule: on the kinds of the
actions before and after it, and on whether it is the first, the second or the last of its kind.
These facts are its *situation*. A run in which each situation of the schedule occurs once shows the
whole step: the program runs a *short* step, from which ``extend`` makes the whole one.

*Equal stages*: stages with the same parameters, whose modules make the same calls, do the same for
a micro-batch. Between consecutive stages only layer names, rank numbers and message tags change,
the numbers by a constant step. The stages between two that were run follow from both (``derive``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from disttensor.comm import p2p
from disttensor.comm.log import CommRecord
from disttensor.pipeline.action import Action
from disttensor.simulate.events import Collective, Label, Message, Name, Op, Wait
from disttensor.simulate.layers import counterparts, renamed
from disttensor.simulate.memory import MemoryChange
from disttensor.simulate.rank_run import Entry, Grid, RankRun, StepPart

_OTHERS = 2  # actions of a kind up to this number have situations of their own
_KEPT = 0.001  # of the memory at the end: a program may keep as much of each step, as losses

# Equal micro-batches ------------------------------------------------------------------------------


def shorten(row: Sequence[Action], recorded: bool = True) -> Sequence[Action]:
    """Returns the actions of a stage without micro-batches that need not run. In a step that is not
    ``recorded`` only the micro-batches at the ends run."""
    numbers = sorted({a.micro_batch for a in row})
    if len(numbers) >= p2p.CHANNELS:  # some micro-batches would share their message numbers
        return row
    # the engine reduces gradients in the last backward of each visit
    ends = {row[0].micro_batch, *{(a.kind, a.chunk): a.micro_batch for a in row}.values()}
    wanted = set(situations(row)) if recorded else set()
    for n in sorted(numbers, key=lambda n: abs(2 * n - len(numbers))):  # from the middle on
        rest = [a for a in row if a.micro_batch != n]
        if n not in ends and wanted.issubset(situations(rest)):
            row = rest
    return row


def can_extend(run: RankRun) -> bool:
    """Returns True if a short step of this run may show the whole one."""
    runs = [one for one in run.runs if one.grids]
    if not all(one.has_equal_transfers for one in runs):
        return False
    if all(len(shorten(one.row)) == len(one.row) for one in runs):
        return False
    with suppress(ValueError, LookupError):  # this stage has to run all of them; others may not
        return _Extension(run).run.events == run.events
    return True


def extend(run: RankRun) -> RankRun:
    """Returns the step with all micro-batches from a short one. Raises ValueError or LookupError if
    an action uses a storage or a work that its template received from elsewhere."""
    if all(len(one.begins) == len(one.row) for one in run.runs if one.grids):
        return run
    out = _Extension(run).run
    more, held = Counter(out.memory.curve[-1][1]), run.memory.curve[-1][1]
    more.subtract(held)
    if max(map(abs, more.values())) > _KEPT * sum(held.values()):
        raise ValueError("the step ends with another amount of memory")
    return out


class _Extension:
    """Builds the step ``run`` with all micro-batches from the short step ``given``. ``places``:
    where each part of the short step stands in the whole one."""

    def __init__(self, given: RankRun) -> None:
        self.run = replace(given, parts=[])
        self.places: dict[Label, list[Label]] = {}
        self.started: set[Name] = {-1}  # works
        self.alive: Counter[Name] = Counter()  # bytes of each storage
        for part in given.parts:
            if part.action is None:
                self._add(part, None, lambda made: made)
                self._add_run(part.run, [p for p in given.parts if p.run == part.run])

    def _add_run(self, number: int, recorded: Sequence[StepPart]) -> None:
        """Adds all actions of a pipeline run, some of which were recorded."""
        parts = {part.action: part for part in recorded if part.action is not None}
        if not parts:
            return
        ran, row = list(parts), self.run.runs[number].row
        by_situation = dict(zip(situations(ran), ran, strict=True))
        sources = [by_situation[situation] for situation in situations(row)]
        uses, index = Counter(sources), {action: i for i, action in enumerate(ran)}

        def counterpart(at: int, made: Action) -> Action:
            """Returns the counterpart of a recorded action, seen from action number ``at``: of the
            same micro-batch; the only one (as of the first backward, which makes gradients); or as
            many actions before."""
            source = sources[at]
            if made.micro_batch == source.micro_batch:
                return made._replace(micro_batch=row[at].micro_batch)
            if uses[made] == 1:
                return row[sources.index(made)]
            before = index[source] - index[made]
            if before > at:
                raise ValueError(f"{row[at]} has no counterpart of {made}, {before} actions before")
            return row[at - before]

        for at, action in enumerate(row):
            self._add(parts[sources[at]], action, partial(counterpart, at))

    def _add(self, part: StepPart, action: Action | None, here: Callable[[Action], Action]) -> None:
        """Adds a part once more, as ``action``. ``here`` returns the counterpart of an action."""
        label = part.run, action
        self.places.setdefault(part.label, []).append(label)

        def names(name: Name) -> list[Name]:
            """Returns the names here of a storage or work. After its pipeline run a name stands for
            the storages or works of all micro-batches."""
            if isinstance(name, int):
                return [name]
            (number, made), nth = name
            if number == part.run and made is not None:
                return [((number, here(made)), nth)]
            return [(place, nth) for place in self.places.get((number, made), ())]

        out = StepPart(part.run, action, [])
        for e in part.log:
            if isinstance(e, MemoryChange):
                blocks = names(e.block)
                alive = [b for b in blocks if isinstance(b, int) or self.alive[b] >= -e.nbytes]
                if blocks and not alive:
                    raise ValueError(f"{e} frees a storage that does not exist")
                self.alive.update(dict.fromkeys(alive, e.nbytes))
                out.log.extend(e._replace(block=b) for b in alive)
                continue
            if isinstance(e, Collective | Message | Wait):
                e = e._replace(work=names(e.work)[-1])
                if isinstance(e, Wait) and e.work not in self.started:
                    raise ValueError(f"{label} waits for {e.work}, which has not started")
                self.started.add(e.work)
            if isinstance(e, Message) and part.action is not None and action is not None:
                tags = self.run.runs[part.run].tags
                a, b = part.action.micro_batch, action.micro_batch
                tag = p2p.tag_in_channel(e.tag, (a + 1, tags[a]), (b + 1, tags[b]))
                e = e._replace(tag=tag)
            out.log.append(e)
        self.run.parts.append(out)


def situations(row: Iterable[Action]) -> list[Hashable]:
    """Returns the situation of each action of a stage."""
    kinds = [(a.kind, a.chunk) for a in row]
    left, seen = Counter(kinds), Counter[Any]()
    out: list[Hashable] = []
    for before, kind, after in zip([None, *kinds], kinds, [*kinds[1:], None], strict=False):
        left[kind] -= 1
        out.append((before, kind, after, min(seen[kind], _OTHERS), left[kind] > 0))
        seen[kind] += 1
    return out


# Equal stages -------------------------------------------------------------------------------------


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
    stages: Collection[tuple[Grid, ...]], work: Mapping[tuple[int, ...], Any],
    kinds: Iterable[Sequence[int]], excluded: Collection[int] = (),
) -> list[DerivedRank]:  # fmt: skip
    """Returns the kinds of ranks that can be derived.

    Args:
        stages: the meshes of the stages, of each pipeline run.
        work: for each mesh, by its ranks, its parameters and the calls of its modules.
        kinds: the ranks of each kind.
        excluded: stages that differ from the others.
    """
    if len(stages) != 1:
        return []
    (grids,) = stages
    place_of = {rank: (s, i) for s, grid in enumerate(grids) for i, rank in enumerate(grid.ranks)}
    first_ranks: dict[tuple[int, frozenset[int]], int] = {}  # (stage, places) -> the first rank
    for ranks in kinds:
        found = [place_of[rank] for rank in ranks if rank in place_of]
        on = {stage for stage, _ in found}
        if len(on) == 1 and len(found) == len(ranks):
            first_ranks[on.pop(), frozenset(place for _, place in found)] = ranks[0]
    does = [(grid.shape, work.get(grid.ranks, stage)) for stage, grid in enumerate(grids)]
    equal_to = [does.index(one) for one in does]
    out = []
    for (stage, places), rank in first_ranks.items():
        group = [s for s in range(1, len(grids) - 1) if equal_to[s] == equal_to[stage]]
        left = [s for s in group if s not in excluded]
        if stage not in left[1:-1]:
            continue
        a, b = left[0], left[-1]
        # exclude the last stage first, which sends to another stage, then the two in turn
        suspect = (b, a)[(len(group) - len(left)) % 2]
        if {(a, places), (b, places)} <= first_ranks.keys():
            first, last = first_ranks[a, places], first_ranks[b, places]
            out.append(DerivedRank(rank, stage, first, last, (a, b), suspect))
    return out


def is_alike(first: RankRun, last: RankRun, rank: DerivedRank) -> bool:
    """Returns True if the last stage does the same as a stage derived from the first."""
    try:
        derived = derive(first, last, replace(rank, rank=last.rank, stage=rank.ends[1]))
    except (ValueError, LookupError):
        return False
    return derived.has_peak_of(last)


def derive(first: RankRun, last: RankRun, rank: DerivedRank) -> RankRun:
    """Returns the parts of ``first`` in the order of the derived rank's stage, with its layers and
    its numbers. Raises ValueError or LookupError if the two are not alike."""
    mine, its = ({part.label: part for part in run.parts} for run in (first, last))
    if mine.keys() != its.keys():
        raise ValueError("the two stages have different actions")
    grids = first.runs[0].grids
    layers = [first.layers.get(grids[s].ranks, []) for s in (rank.ends[0], rank.stage)]
    rename = cache(partial(renamed, names=counterparts(*layers)))
    parts = []
    for label in first.labels(rank.stage):
        a, b = ([e for e in part[label].log if not isinstance(e, MemoryChange)]
                for part in (mine, its))  # fmt: skip
        events = iter([_event(x, y, rank, rename) for x, y in zip(a, b, strict=True)])
        log = [e if isinstance(e, MemoryChange) else next(events) for e in mine[label].log]
        parts.append(mine[label]._replace(log=log))
    return replace(first, rank=rank.rank, warnings=[], layers={}, parts=parts)


def _event(a: Entry, b: Entry, rank: DerivedRank, rename: Callable[[str], str]) -> Entry:
    """Raises ValueError if the two differ in more than layers, numbers and process groups."""
    own: dict[str, Any] = {}  # of the derived rank
    if isinstance(a, Op) and a.layer:
        own = {"layer": rename(a.layer)}
    elif isinstance(a, Message) and isinstance(b, Message):
        own = {"peer": rank.interpolate(a.peer, b.peer), "tag": rank.interpolate(a.tag, b.tag)}
    elif isinstance(a, Collective) and isinstance(b, Collective):
        ranks = zip(a.ranks, b.ranks, strict=True)
        own = {"ranks": tuple(rank.interpolate(x, y) for x, y in ranks), "group": a.group}
    elif isinstance(a, CommRecord) and isinstance(b, CommRecord) and a.axis != b.axis:
        ends = zip(a.axis.split(" -> "), b.axis.split(" -> "), strict=True)
        own = {"axis": " -> ".join(str(rank.interpolate(int(x), int(y))) for x, y in ends)}
    changed: Any = replace if isinstance(a, CommRecord) else type(a)._replace
    if type(a) is not type(b) or changed(a, **{f: getattr(b, f) for f in own}) != b:
        raise ValueError(f"{a} and {b}")
    return changed(a, **own) if own else a
