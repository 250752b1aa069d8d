"""Schedules in which gradients of weights fill the bubble. A backward is split into I, which the
stage before waits for, and W, which no stage waits for. An I directly followed by its W is merged
into one B, which takes less time, if no stage waits for the I: on the first stage, and on others at
such times.

From Qi et al., Zero Bubble Pipeline Parallelism (2023; ZB-H1, ZB-V), and DualPipeV, the DualPipe of
DeepSeek cut in half (2025).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.steady import interleaved, one_visit, sizes


def zero_bubble(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns ZB-H1: "1f1b" with the W of stage s deferred by s micro-batches. It holds at most as
    much as stage 0 of "1f1b", and idles (p - 1) (F + I - W): a third of "1f1b" if F = I = W.

    >>> pipeline.zero_bubble(2, 3)
    Schedule(['F0 F1 B0 F2 B1 B2', 'F0 I0 F1 I1 W0 F2 I2 W1 W2'])

    Raises ValueError for several visits.
    """
    instead = "'interleaved_zero_bubble', 'zbv' or 'dualpipev'"
    rows = one_visit("zero_bubble", instead, stages, micro_batches, chunks)
    return _schedule([_defer_weights(row, s) for s, row in enumerate(rows)])


def interleaved_zero_bubble(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Returns "interleaved_1f1b" with deferred W: a shorter way down, as I is as long as F.

    >>> pipeline.interleaved_zero_bubble(1, 1, 2)
    Schedule(['F0 F0.1 I0.1 W0.1 B0'])
    """
    sizes(stages, micro_batches, chunks)
    if chunks == 1:
        return zero_bubble(stages, micro_batches)
    rows = interleaved(stages, micro_batches, chunks, ahead=1)
    return _schedule([_defer_weights(row, s) for s, row in enumerate(rows)])


def zbv(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Returns ZB-V: visits every mesh on the way there and on the way back, so the first one has
    the loss. It holds as much as "1f1b". If F, I and W take equal times and there are 2 p - 1
    micro-batches or more, it idles for p - 1 of these times only. Backwards between the two ends
    are whole: the paper runs W directly after I there, and no stage needs that I earlier.

    >>> pipeline.zbv(1, 1)
    Schedule(['F0 F0.1 B0.1 B0'], shape='v')
    """
    _two("zbv", stages, micro_batches, chunks)
    m = max(micro_batches, 2 * stages - 1)
    rows = []
    for s in range(stages):
        row = _StageOrder()
        # An I that a stage waits for is split from its W: near the ends, or always if both meet.
        back = "B.1" if m == micro_batches else "I.1 W.1"
        parted = (m - 2 * stages + s if s else m) if m == micro_batches else 0
        row.add("F.0", 2 * (stages - s) - 1)
        row.add("F.1 F.0", s)
        row.add("F.1 I.1 W.1", stages - 1 - s)
        row.add(f"F.1 {back}")
        while row.count["F.1"] < m:
            row.add("F.0" if row.count["F.0"] < m else "")
            row.add("B.0" if row.count["I.0"] < parted else "I.0 W.0")
            row.add(f"F.1 {back}")
        row.add("I.0 I.1", s)
        row.add("I.0 W.0", stages - s)
        for chunk in (1, 0):
            row.add(f"W.{chunk}", sum(a.chunk == chunk for a in row.deferred))
        rows.append(row.actions)
    return _without(rows, micro_batches)


def dualpipev(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Returns DualPipeV: like "zbv", with whole backwards, alternating with forwards of the other
    direction, if no stage waits for them.

    >>> pipeline.dualpipev(1, 2)
    Schedule(['F0 F0.1 F1 B0.1 F1.1 B0 B1.1 B1'], shape='v')
    """
    _two("dualpipev", stages, micro_batches, chunks)
    m = max(micro_batches, 2 * stages)
    rows = []
    for s in range(stages):
        row, after = _StageOrder(), stages - 1 - s
        row.add("F.0", 2 * after)
        row.add("F.0 F.1", s + 1)
        row.add("I.1 W F.1", after)
        row.add("F.0 B.1 F.1 B.0", m - 2 * stages + s + 1)
        row.add("B.1 F.1 B.0", after)
        halves = 2 * (s + 1)
        whole = 2 * ((s + 1) // 2) + (s % 2 == 0)
        for i in range(halves):
            row.add(("B" if i < whole else "I") + (".1", ".0")[i % 2])
        row.add("W I.0", after)
        row.add("W", len(row.deferred))
        rows.append(row.actions)
    return _without(rows, micro_batches)


class _StageOrder:
    """The order of one stage: ``add("F.0 I.1")`` takes the next micro-batch of each. A W belongs to
    the oldest I without a W (of this chunk, if given)."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[str] = Counter()
        self.deferred: list[Action] = []

    def add(self, what: str, times: int = 1) -> None:
        for item in what.split() * times:
            kind, _, chunk = item.partition(".")
            if kind == "W":
                self._add_weights(chunk)
                continue
            step = "I" if kind == "B" else kind  # both take the next gradient
            action = Action(kind, self.count[f"{step}.{chunk}"], int(chunk))
            self.count[f"{step}.{chunk}"] += 1
            self.actions.append(action)
            if kind == "I":
                self.deferred.append(action)

    def _add_weights(self, chunk: str) -> None:
        for action in self.deferred:
            if chunk in ("", str(action.chunk)):
                self.deferred.remove(action)
                self.actions.append(action._replace(kind="W"))
                return


def _defer_weights(order: Iterable[Action], by: int) -> list[Action]:
    """Splits each B into I, and W after the I of ``by`` more micro-batches."""
    made: list[Action] = []
    waiting: deque[Action] = deque()
    for action in order:
        if action.kind != "B":
            made.append(action)
            continue
        made.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > by:
            made.append(waiting.popleft())
    return [*made, *waiting]


def _without(rows: list[list[Action]], micro_batches: int) -> Schedule:
    """Keeps the first micro-batches of a schedule for more of them."""
    return _schedule([[a for a in row if a.micro_batch < micro_batches] for row in rows], shape="v")


def _schedule(rows: list[list[Action]], shape: str = "loop") -> Schedule:
    """Returns the schedule of these orders, with neighbouring I and W of the first stage's first
    visit merged into one B."""
    first: list[Action] = []
    for action in rows[0]:
        before = action._replace(kind="I")
        if action.kind == "W" and action.chunk == 0 and first and first[-1] == before:
            first[-1] = action._replace(kind="B")
        else:
            first.append(action)
    return Schedule([first, *rows[1:]], shape)


def _two(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    sizes(stages, micro_batches, chunks)
    if chunks != 2:
        raise ValueError(
            f"{name!r} visits each stage twice, there and back, and chunks={chunks}: give "
            "stages=[mesh0, mesh1, mesh1, mesh0]"
        )
