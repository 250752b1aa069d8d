"""Durations of the actions of a pipeline, and the duration of a schedule with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from disttensor.checks import check_number, check_type
from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule, virtual
from disttensor.pipeline.timeline import Timeline

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in any one unit: of a forward F, of the gradients of inputs I and of weights W, each
    one number or one for each virtual stage, and of a transfer from stage to stage.

    >>> pipeline.Costs(1.0, 1.0, [1.0, 2.0], transfer=0.1).of_action(1, "B")
    3.0

    Raises TypeError or ValueError for values that are no durations.
    """

    forward: Numbers
    inputs: Numbers
    weights: Numbers
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "inputs", "weights", "transfer"):
            value = getattr(self, name)
            several = isinstance(value, (list, tuple)) and name != "transfer"
            if several and not value:
                raise ValueError(f"Costs: {name}={value!r}: one for each virtual stage is expected")
            for number in value if several else (value,):
                check_number(f"Costs: {name}", number)
                if not 0 <= number < math.inf:
                    raise ValueError(
                        f"Costs: {name}={value!r}: durations are 0 or more, and finite"
                    )
            if several:
                object.__setattr__(self, name, tuple(value))

    @classmethod
    def of(cls, timeline: Timeline, transfer: float = 0.0) -> Costs:
        """Returns the medians of a recorded run for each virtual stage, without waits. A B without
        I and W counts as two halves. All ranks that share the timeline get the same costs. Raises
        ValueError for a timeline without actions, or with schedules of both shapes.

        >>> with pipeline.record() as recorded:
        ...     losses = pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0])
        >>> pipeline.Costs.of(recorded.timeline()).of_action(0, "F") > 0
        True
        """
        check_type("Costs.of: timeline", timeline, Timeline, "a Timeline")
        seconds: dict[tuple[int, int, str], list[float]] = {}
        for rank in timeline.ranks:
            busy: dict[Action, float] = {}
            stage = {}
            for event, start, end in timeline.pieces(rank):
                busy[event.action] = busy.get(event.action, 0.0) + end - start
                stage[event.action] = event.stage
            for action, time in busy.items():
                seconds.setdefault((action.chunk, stage[action], action.kind), []).append(time)
        places = [*{(chunk, stage) for chunk, stage, _ in seconds}]
        if not places:
            raise ValueError(f"Costs.of: {timeline!r} has no forward and no backward")
        shapes, stages = {e.shape for e in timeline.events}, 1 + max(s for _, s in places)
        if len(shapes) > 1:
            raise ValueError(
                f"Costs.of: {timeline!r} is of schedules in a loop and in a V, whose visits are "
                "not the same: record each run on its own"
            )
        shape = shapes.pop()
        places.sort(key=lambda place: virtual(shape, stages, place[1], place[0]))

        def typical(place: tuple[int, int], kind: str) -> float:
            half = kind in "IW" and (*place, kind) not in seconds
            found = seconds.get((*place, "B" if half else kind), [0.0])
            return median(found) / (2 if half else 1)

        forward, inputs, weights = ([typical(p, kind) for p in places] for kind in "FIW")
        return cls(forward, inputs, weights, transfer)

    def of_action(self, virtual: int, kind: str) -> float:
        """Returns the time of an action of this kind on a virtual stage."""
        if kind == "B":
            return self.of_action(virtual, "I") + self.of_action(virtual, "W")
        value = {"F": self.forward, "I": self.inputs, "W": self.weights}[kind]
        return value[virtual] if isinstance(value, Sequence) else value

    def check(self, virtual_stages: int) -> None:
        """Raises ValueError if the costs are for another number of virtual stages."""
        for name in ("forward", "inputs", "weights"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != virtual_stages:
                raise ValueError(
                    f"Costs: {name} has {len(value)} numbers, and there are {virtual_stages} "
                    "virtual stages (stages times chunks): give one for each, or one for all"
                )

    def span(self, schedule: Schedule) -> float:
        """Returns the time from first start to last end if each action starts as soon as it can.

        >>> pipeline.Costs(1, 1, 1).span(pipeline.one_f_one_b(2, 2))
        9.0
        """
        check_type("Costs.span: schedule", schedule, Schedule, "a Schedule")
        self.check(schedule.stages * schedule.chunks)
        schedule.check()

        def cost(stage: int, action: Action) -> float:
            return float(self.of_action(schedule.virtual(stage, action.chunk), action.kind))

        rows = schedule.simulated(cost, self.transfer)[0]
        return max(tick.end for row in rows for tick in row)
