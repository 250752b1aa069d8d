"""A schedule: for each stage of a pipeline, the order of its forwards and backwards. A value, no
more.

A stage may be visited several times (chunks): the program then goes through the *virtual* stages
``chunk * stages + stage`` = 0, 1, 2, ... and its backward through the same ones in reverse. ``F(v,
m)`` needs ``F(v - 1, m)``; ``B(v, m)`` needs ``F(v, m)`` and ``B(v + 1, m)``. Sending never blocks.

The examples of this package run after ``from disttensor import pipeline``.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from disttensor import arguments

_TEXT = re.compile(r"([FB])(\d+)(?:\.(\d+))?")
_SHOWN = 4  # of many wrong actions an error names so many


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of a micro-batch through a stage, on its visit ``chunk``.

    >>> print(pipeline.Action("F", 3), pipeline.Action("B", 3, chunk=1))
    F3 B3.1
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Tick(NamedTuple):
    """When a stage carries out an action, if all stages take the same time and sending takes none.

    >>> pipeline.gpipe(1, 1).ticks()[0][1]
    Tick(action=Action(kind='B', micro_batch=0, chunk=0), start=1, end=3)
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Schedule:
    """``orders[s]``: what stage s carries out, in this order; as text or as Actions. Frozen,
    hashable.

    >>> mine = pipeline.Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    >>> mine.check()
    >>> mine == pipeline.one_f_one_b(2, 2), mine.stages, mine.micro_batches, mine.peak(0)
    (True, 2, 2, 2)

    Raises ValueError for what is no action; ``check`` finds what is wrong with the order.
    """

    orders: tuple[tuple[Action, ...], ...]

    def __init__(self, orders: Iterable[str | Iterable[Action | str]]) -> None:
        if isinstance(orders, str):
            raise ValueError(f"Schedule: one order per stage, a list of them: [{orders!r}, ...]")
        given = arguments.listed("Schedule: orders", orders, "a list of an order for each stage")
        rows = tuple(tuple(_actions(order, stage)) for stage, order in enumerate(given))
        if not any(rows):
            raise ValueError("Schedule: no stage has an action, as in Schedule(['F0 B0'])")
        object.__setattr__(self, "orders", rows)

    @property
    def stages(self) -> int:
        return len(self.orders)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(a.micro_batch for order in self.orders for a in order)

    @cached_property
    def chunks(self) -> int:
        """How often the program visits each stage."""
        return 1 + max(a.chunk for order in self.orders for a in order)

    def peak(self, stage: int) -> int:
        """The most micro-batches (times chunks) after their F and before their B on ``stage``."""
        arguments.whole("peak: stage", stage)
        if not 0 <= stage < self.stages:
            raise ValueError(
                f"peak: no stage {stage}; this schedule has stages 0..{self.stages - 1}"
            )
        live = most = 0
        for action in self.orders[stage]:
            live += 1 if action.kind == "F" else -1
            most = max(most, live)
        return most

    def check(self) -> None:
        """Raises ValueError for a missing, repeated or too early action, and for a deadlock."""
        wrong = [line for stage in range(self.stages) for line in self._wrong(stage)]
        if not wrong:
            wrong = self._simulate(1, 1)[1]
            if wrong:
                wrong = ["it never ends; each of these stages waits for another:", *wrong]
        if wrong:
            sizes = (
                f"{self.stages} stages, {self.micro_batches} micro-batches, {self.chunks} chunks"
            )
            raise ValueError("\n  ".join([f"Schedule of {sizes} cannot be carried out:", *wrong]))

    def ticks(self, forward: float = 1, backward: float = 2) -> list[list[Tick]]:
        """The actions of each stage with start and end, by the costs of F and B."""
        arguments.number("ticks: forward", forward)
        arguments.number("ticks: backward", backward)
        if not (forward >= 0 and backward >= 0 and 0 < forward + backward < float("inf")):
            raise ValueError(f"ticks: {forward=} and {backward=} are no durations; one must be > 0")
        self.check()
        return self._simulate(forward, backward)[0]

    def bubble(self, forward: float = 1, backward: float = 2) -> float:
        """The idle part of all stages' time, 0 to 1: (p - 1) / (m + p - 1) for "gpipe" and "1f1b".

        >>> pipeline.gpipe(4, 1).bubble(), pipeline.one_f_one_b(2, 3).bubble()
        (0.75, 0.25)
        """
        ticks = self.ticks(forward, backward)
        span = max(tick.end for row in ticks for tick in row)
        busy = self.micro_batches * self.chunks * (forward + backward)  # of each stage
        return 1 - busy / span

    def __repr__(self) -> str:
        lines = [repr(" ".join(map(str, order))) for order in self.orders]
        if sum(map(len, lines)) < 80:
            return f"Schedule([{', '.join(lines)}])"
        return "Schedule([\n" + "".join(f"    {line},\n" for line in lines) + "])"

    def _wrong(self, stage: int) -> Iterator[str]:
        """What is wrong with the order of one stage, whatever the others do."""
        order = self.orders[stage]
        count = Counter(order)
        wanted = (
            Action(kind, m, c)
            for m in range(self.micro_batches)
            for c in range(self.chunks)
            for kind in "FB"
        )
        missing = list(islice((a for a in wanted if a not in count), _SHOWN + 1))
        if missing:
            yield f"stage {stage} lacks {_listed(missing)}"
        twice = [a for a, n in count.items() if n > 1]
        if twice:
            yield f"stage {stage} has {_listed(twice)} more than once"
        place = {action: i for i, action in reversed(list(enumerate(order)))}
        early = [
            a for a in count if a.kind == "B" and place.get(a._replace(kind="F"), -1) > place[a]
        ]
        if early:
            yield f"stage {stage} has {_listed(early)} before its own forward"

    def _needs(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """(stage, action) of another virtual stage that must be over before, if any."""
        step = -1 if action.kind == "F" else 1
        virtual = action.chunk * self.stages + stage + step
        if not 0 <= virtual < self.stages * self.chunks:
            return None
        chunk, there = divmod(virtual, self.stages)
        return there, action._replace(chunk=chunk)

    def _simulate(self, forward: float, backward: float) -> tuple[list[list[Tick]], list[str]]:
        """The ticks as far as they go, and a line for each stage that does not come to its end.

        Each stage does what is next as soon as it can, so the times do not depend on the order of
        the loop. Takes for granted that each stage on its own is in order (``_wrong``).
        """
        ticks: list[list[Tick]] = [[] for _ in self.orders]
        over: dict[tuple[int, Action], float] = {}
        ready = deque(range(self.stages))
        while ready:
            stage = ready.popleft()
            order, row = self.orders[stage], ticks[stage]
            before = len(row)
            while len(row) < len(order):
                action = order[len(row)]
                needs = self._needs(stage, action)
                if needs is not None and needs not in over:
                    break
                start = max(over[needs] if needs else 0, row[-1].end if row else 0)
                end = start + (forward if action.kind == "F" else backward)
                row.append(Tick(action, start, end))
                over[stage, action] = end
            if len(row) > before:  # the virtual stages before and after may go on
                ready += {(stage - 1) % self.stages, (stage + 1) % self.stages}
        stuck = []
        for stage, (order, row) in enumerate(zip(self.orders, ticks, strict=True)):
            if len(row) < len(order):
                action = order[len(row)]
                there, what = self._needs(stage, action) or (stage, action)
                stuck.append(
                    f"stage {stage} at {action} (its action {len(row)}): waits for {what} of stage "
                    f"{there}"
                )
        return ticks, stuck


def _actions(order: str | Iterable[Action | str], stage: int) -> Iterator[Action]:
    row = order.split() if isinstance(order, str) else order
    for item in arguments.listed(f"Schedule: order of stage {stage}", row, 'actions, as "F0 B0",'):
        if isinstance(item, str):
            match = _TEXT.fullmatch(item)
            if match is None:
                raise ValueError(
                    f"Schedule: {item!r} in the order of stage {stage}: write F0, B0, or F0.1 for "
                    "chunk 1"
                )
            yield Action(match[1], int(match[2]), int(match[3] or 0))
            continue
        try:
            action = Action(*item)
            right = action.kind in ("F", "B") and all(
                isinstance(n, int) and n >= 0 for n in action[1:]
            )
        except TypeError:
            right = False
        if not right:
            raise ValueError(
                f"Schedule: {item!r} in the order of stage {stage}: an Action is 'F' or 'B', a "
                "micro-batch >= 0, a chunk >= 0"
            )
        yield action


def _listed(actions: list[Action]) -> str:
    return ", ".join(map(str, actions[:_SHOWN])) + (", ..." if len(actions) > _SHOWN else "")
