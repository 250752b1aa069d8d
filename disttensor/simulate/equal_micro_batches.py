"""Micro-batches that do the same: a few of them are run, and the others follow.

Every action does what the one in its situation does (``few_micro_batches.py``), with the tags of
its own messages, and blocks of memory and works of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from disttensor.comm import p2p
from disttensor.comm.log import CommRecord
from disttensor.pipeline import Action
from disttensor.simulate.events import Collective, Event, Message, Wait
from disttensor.simulate.few_micro_batches import situations
from disttensor.simulate.memory import Step
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.visits import Mark, Piece, PipelineRun

_KEPT = 0.001  # of the memory at the end: as much programs may keep of micro-batches, as losses


def filled(run: RankRun) -> RankRun:
    """The step with all micro-batches, of a run with few. Raises ValueError where what is used in
    an action was not made where it is made in the one in the same situation."""
    if not any(one.left_out for one in run.runs):
        return run
    return _Filling(run).filled()


Place = tuple[int, int]  # a pipeline run, and an action in the order of its stage


class _Filling:
    """A rank's step while it is filled up. A *place* is where a piece stands in the full order;
    (run, None) and (run, -1) are those between runs."""

    def __init__(self, run: RankRun) -> None:
        self.run = run
        self.events: list[Event] = []
        self.comms: list[CommRecord] = []
        self.changes: list[Step] = []
        self.parts: list[Piece] = []
        self.numbers: dict[tuple[str, Any, int], int] = {}  # of blocks and works
        self.alive: dict[int, int] = {}  # bytes of each block
        self.count: Counter[str] = Counter()  # collectives of each group
        self.made = {"block": _blocks(run), "work": _works(run)}
        self.users: dict[int, list[Any]] = {}  # a piece -> places at which it was used

    def filled(self) -> RankRun:
        run, at = self.run, 0
        while at < len(run.parts):
            piece = run.parts[at]
            if piece.action is None:
                self._add(at, piece.run, None, (piece.run, None), {})
                at += 1
                continue
            end = at
            while run.parts[end].action is not None:
                end += 1
            self._pipeline(piece.run, run.runs[piece.run], at, end)
            at = end
        out = replace(
            run, events=self.events, comms=self.comms, changes=self.changes,
            parts=tuple(self.parts),
        )  # fmt: skip
        more, level = Counter(out.level()), run.level()
        more.subtract(level)
        if max(map(abs, more.values())) > _KEPT * sum(level.values()):
            raise ValueError("another level of memory at the end of the step")
        return out

    def _pipeline(self, number: int, one: PipelineRun, begin: int, end: int) -> None:
        """``run.parts[begin:end]`` are what was run of it."""
        row = one.orders[one.stage]
        ran = [p.action for p in self.run.parts[begin:end] if p.action is not None]
        by_situation = dict(zip(situations(ran), range(begin, end), strict=True))
        sources = [by_situation[situation] for situation in situations(row)]
        where = {action: at for at, action in enumerate(row)}
        once = {s: at for at, s in enumerate(sources) if sources.count(s) == 1}
        for at, (action, source) in enumerate(zip(row, sources, strict=True)):
            model = ran[source - begin]
            # where in the full order the pieces before this one stand: of the same micro-batch; at
            # the only place, as the first backward, which makes gradients; as far from here
            places: dict[int, Any] = {}
            for other, its in enumerate(ran[: source - begin + 1], begin):
                if its.micro_batch == model.micro_batch:
                    place = where[its._replace(micro_batch=action.micro_batch)]
                else:
                    place = once.get(other, at - (source - other))
                places[other] = (number, place)
            self._add(source, number, action, (number, at), places)

    def _add(
        self, source: int, number: int, action: Action | None, place: Any, places: dict[int, Any]
    ) -> None:
        """The piece number ``source`` once more, at ``place``. ``places``: those of the pieces
        whose blocks and works it uses."""
        run, piece = self.run, self.run.parts[source]
        self.users.setdefault(source, []).append(place)
        start = Mark(len(self.events), len(self.changes), len(self.comms))
        shift = start.events - piece.start.events
        for event in run.events[piece.start.events : piece.end.events]:
            self.events.append(self._event(event, piece, action, places))
        for step in run.changes[piece.start.changes : piece.end.changes]:
            blocks = self._blocks(step, places)
            for block in blocks:
                self.alive[block] = self.alive.get(block, 0) + step.nbytes
                self.changes.append(step._replace(event=step.event + shift, block=block))
        self.comms += self._comms(piece)
        end = Mark(len(self.events), len(self.changes), len(self.comms))
        self.parts.append(Piece(number, action, start, end))

    def _comms(self, piece: Piece) -> list[CommRecord]:
        return self.run.comms[piece.start.comms : piece.end.comms]

    def _event(
        self, event: Event, piece: Piece, action: Action | None, places: dict[int, Any]
    ) -> Event:
        if isinstance(event, Collective):
            self.count[event.group] += 1
            work = self._number("work", event.work, places)
            return event._replace(work=work, number=self.count[event.group] - 1)
        if isinstance(event, Message):
            work = self._number("work", event.work, places)
            return event._replace(work=work, tag=self._tag(event.tag, piece, action))
        if isinstance(event, Wait):
            return Wait(self._number("work", event.work, places))
        return event

    def _tag(self, tag: int, piece: Piece, action: Action | None) -> int:
        if action is None or piece.action is None:
            return tag
        tags = self.run.runs[piece.run].tags
        a, b = piece.action.micro_batch, action.micro_batch
        return p2p.moved_tag(tag, (a + 1, tags[a]), (b + 1, tags[b]))

    def _number(self, what: str, old: int, places: dict[int, Any]) -> int:
        """The number here of a block or work of the run; its own where it was there before."""
        made = self.made[what].get(old)
        if made is None:
            return old
        source, nth = made
        place = places.get(source)
        if place is None:  # between two runs, or used after its run: seen from the end of that
            place = self.users[source][-1]
        key = what, place, nth
        if key not in self.numbers:
            self.numbers[key] = -1 - len(self.numbers)  # no number of what was there before
        return self.numbers[key]

    def _blocks(self, step: Step, places: dict[int, Any]) -> list[int]:
        """The blocks that have more or fewer bytes: what is freed after the run of all that made
        one, is freed for all."""
        made = self.made["block"].get(step.block)
        if made is None:
            return [step.block]
        source, nth = made
        if source in places or self.run.parts[source].action is None:
            block = self._number("block", step.block, places)
            if step.nbytes < 0 and self.alive.get(block, 0) < -step.nbytes:
                raise ValueError(f"{step} frees what is not there")
            return [block]
        keys = [("block", place, nth) for place in self.users.get(source, ())]
        blocks = [self.numbers[key] for key in keys if key in self.numbers]
        return [b for b in blocks if self.alive.get(b, 0) + step.nbytes >= 0]


Made = dict[int, tuple[int, int]]  # number -> the piece that made it, and how many before it there


def _works(run: RankRun) -> Made:
    out: Made = {}
    for number, piece in enumerate(run.parts):
        started = (
            e.work for e in run.events[piece.start.events : piece.end.events]
            if isinstance(e, Collective | Message)
        )  # fmt: skip
        out.update((work, (number, nth)) for nth, work in enumerate(started))
    return out


def _blocks(run: RankRun) -> Made:
    out: Made = {}
    for number, piece in enumerate(run.parts):
        seen = [step.block for step in run.changes[piece.start.changes : piece.end.changes]]
        new = [b for b in dict.fromkeys(seen) if b >= run.blocks_before and b not in out]
        out.update((block, (number, nth)) for nth, block in enumerate(new))
    return out
