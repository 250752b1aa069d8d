"""Derives the micro-batches of a step that did not run from similar ones that did.

An action of a rank depends on its neighbours in the schedule: on the kinds of the actions before
and after it, and on whether it is the first, the second or the last of its kind. These facts are
its *situation*. If micro-batches are equal, a run in which each situation of the schedule occurs
once shows the whole step: each action does the same as the recorded action in its situation, with
its own message tags, storages and works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from disttensor.comm import p2p
from disttensor.simulate.events import Collective, Event, Message, Wait
from disttensor.simulate.memory import MemoryChange
from disttensor.simulate.rank_run import Action, ActionSlice, PipelineRun, RankRun, StepBuilder

_OTHERS = 2  # actions of a kind up to this number have situations of their own
_KEPT = 0.001  # of the memory at the end: a program may keep as much of each step, as losses

# Few micro-batches --------------------------------------------------------------------------------


def situations(row: Sequence[Action]) -> list[Hashable]:
    """Returns the situation of each action of a stage."""
    kinds = [(a.kind, a.chunk) for a in row]
    left, seen = Counter(kinds), Counter[Any]()
    out: list[Hashable] = []
    for before, kind, after in zip([None, *kinds], kinds, [*kinds[1:], None], strict=False):
        left[kind] -= 1
        out.append((before, kind, after, min(seen[kind], _OTHERS), left[kind] > 0))
        seen[kind] += 1
    return out


def left_out(row: Sequence[Action], recorded: bool = True) -> dict[int, int]:
    """Returns the micro-batches that need not run, each with one whose loss replaces its own. In a
    step that is not ``recorded`` only the micro-batches at the ends run."""
    numbers = sorted({a.micro_batch for a in row})
    if len(numbers) >= p2p.CHANNELS:  # some micro-batches would share their message numbers
        return {}
    # the engine reduces gradients in the last backward of each visit
    ends = {row[0].micro_batch, *{(a.kind, a.chunk): a.micro_batch for a in row}.values()}
    kept = _with_all_situations(row, ends) if recorded else set(ends)
    for n in sorted(kept - ends):
        if not _missing(row, kept - {n}):
            kept.remove(n)
    return {n: max(k for k in kept if k < n) for n in numbers if n not in kept}


def _with_all_situations(row: Sequence[Action], ends: set[int]) -> set[int]:
    """Adds micro-batches to ``ends`` until all situations occur: in each round an action with a
    missing situation, and its neighbours."""
    kept, order = set(ends), situations(row)
    while missing := _missing(row, kept):
        choices = [kept | {min({a.micro_batch for a in row} - kept)}]
        for situation in missing:
            first = order.index(situation)
            last = len(row) - 1 - order[::-1].index(situation)
            for at in (first, last):
                choices.append(kept | {a.micro_batch for a in row[max(0, at - 1) : at + 2]})
        new = [choice for choice in choices if choice != kept]
        kept = min(new, key=lambda choice: (len(_missing(row, choice)), sorted(choice)))
    return kept


def _missing(row: Sequence[Action], kept: Collection[int]) -> set[Hashable]:
    """Returns the situations that do not occur in a run of these micro-batches."""
    return set(situations(row)).difference(situations([a for a in row if a.micro_batch in kept]))


def can_repeat(run: RankRun) -> bool:
    """Returns True if few of the micro-batches of this run show all of them."""
    runs = [one for one in run.runs if one.grids]
    return any(left_out(one.orders[one.stage]) for one in runs) and all(
        one.has_equal_micro_batches for one in runs
    )


# All micro-batches --------------------------------------------------------------------------------


def fill(run: RankRun) -> RankRun:
    """Returns the step with all micro-batches from a run with few. Raises ValueError if an action
    uses a storage or a work that its recorded counterpart received from elsewhere."""
    return _Filling(run).fill() if any(one.left_out for one in run.runs) else run


class _Filling:
    """A step while it is filled. The *place* of a slice is (pipeline run, index in the full order
    of the stage); the place of a part between runs is (pipeline run, None)."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.builder = StepBuilder(run)
        self.numbers: dict[tuple[str, Any, int], int] = {}  # of storages and works
        self.alive: Counter[int] = Counter()  # bytes of each storage
        self.count: Counter[str] = Counter()  # collectives of each group
        self.made = {"block": _blocks(run), "work": _works(run)}
        self.users: dict[int, list[Any]] = {}  # a slice -> the places at which it was used

    def fill(self) -> RankRun:
        run, at = self.run, 0
        while at < len(run.slices):
            part = run.slices[at]
            if part.action is None:
                self._add(at, None, (part.run, None), {})
                at += 1
                continue
            end = at
            while run.slices[end].action is not None:
                end += 1
            self._fill_pipeline(part.run, run.runs[part.run], at, end)
            at = end
        out = self.builder.build()
        more, held = Counter(out.held_at_end()), run.held_at_end()
        more.subtract(held)
        if max(map(abs, more.values())) > _KEPT * sum(held.values()):
            raise ValueError("the derived step ends with another amount of memory")
        return out

    def _fill_pipeline(self, number: int, one: PipelineRun, begin: int, end: int) -> None:
        """Adds all actions of a pipeline run, of which ``run.slices[begin:end]`` were recorded."""
        row = one.orders[one.stage]
        ran = [p.action for p in self.run.slices[begin:end] if p.action is not None]
        by_situation = dict(zip(situations(ran), range(begin, end), strict=True))
        sources = [by_situation[situation] for situation in situations(row)]
        where = {action: at for at, action in enumerate(row)}
        once = {s: at for at, s in enumerate(sources) if sources.count(s) == 1}
        for at, (action, source) in enumerate(zip(row, sources, strict=True)):
            model = ran[source - begin]
            # The place of each earlier slice, seen from here: an action of the same micro-batch;
            # the only place of the slice (as of the first backward, which makes gradients); or as
            # many actions before this one as in the recorded order.
            places: dict[int, Any] = {}
            for other, earlier in enumerate(ran[: source - begin + 1], begin):
                if earlier.micro_batch == model.micro_batch:
                    place = where[earlier._replace(micro_batch=action.micro_batch)]
                else:
                    place = once.get(other, at - (source - other))
                places[other] = (number, place)
            self._add(source, action, (number, at), places)

    def _add(self, source: int, action: Action | None, place: Any, places: dict[int, Any]) -> None:
        """Adds slice number ``source`` once more, at ``place``. ``places``: the places of the
        slices whose storages and works it uses."""
        part = self.run.slices[source]
        self.users.setdefault(source, []).append(place)
        events, changes, comms = self.run.cut(part)
        events = [self._event(event, part, action, places) for event in events]
        numbered = []
        for change in changes:
            for block in self._changed_blocks(change, places):
                self.alive[block] += change.nbytes
                numbered.append(change._replace(block=block))
        self.builder.add(part, action, events, numbered, comms)

    def _event(
        self, event: Event, part: ActionSlice, action: Action | None, places: dict[int, Any]
    ) -> Event:
        if not isinstance(event, Collective | Message | Wait):
            return event
        event = event._replace(work=self._number("work", event.work, places))
        if isinstance(event, Collective):
            self.count[event.group] += 1
            return event._replace(number=self.count[event.group] - 1)
        if isinstance(event, Message) and action is not None and part.action is not None:
            tags = self.run.runs[part.run].tags
            a, b = part.action.micro_batch, action.micro_batch
            return event._replace(
                tag=p2p.tag_in_channel(event.tag, (a + 1, tags[a]), (b + 1, tags[b]))
            )
        return event

    def _number(self, kind: str, old: int, places: dict[int, Any]) -> int:
        """Returns the number here of a recorded storage or work; ``old`` if it is older than the
        step."""
        made = self.made[kind].get(old)
        if made is None:
            return old
        source, nth = made
        place = places.get(source)
        if place is None:  # between two runs, or used after its run: the last place of its slice
            place = self.users[source][-1]
        return self.numbers.setdefault((kind, place, nth), -1 - len(self.numbers))

    def _changed_blocks(self, change: MemoryChange, places: dict[int, Any]) -> list[int]:
        """Returns the storages that change. A storage that is freed after its pipeline run is freed
        for all micro-batches."""
        made = self.made["block"].get(change.block)
        if made is None:
            return [change.block]
        source, nth = made
        if source in places or self.run.slices[source].action is None:
            block = self._number("block", change.block, places)
            if change.nbytes < 0 and self.alive[block] < -change.nbytes:
                raise ValueError(f"{change} frees a storage that does not exist")
            return [block]
        keys = [("block", place, nth) for place in self.users.get(source, ())]
        blocks = [self.numbers[key] for key in keys if key in self.numbers]
        return [b for b in blocks if self.alive[b] + change.nbytes >= 0]


Made = dict[int, tuple[int, int]]  # number -> (the slice that made it, how many before it there)


def _works(run: RankRun) -> Made:
    """Returns which slice started each work."""
    out: Made = {}
    for number, part in enumerate(run.slices):
        started = [e.work for e in run.cut(part)[0] if isinstance(e, Collective | Message)]
        out.update((work, (number, nth)) for nth, work in enumerate(started))
    return out


def _blocks(run: RankRun) -> Made:
    """Returns which slice made each storage."""
    out: Made = {}
    for number, part in enumerate(run.slices):
        seen = dict.fromkeys(change.block for change in run.cut(part)[1])
        new = [b for b in seen if b >= run.blocks_before and b not in out]
        out.update((block, (number, nth)) for nth, block in enumerate(new))
    return out
