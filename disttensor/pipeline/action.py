"""Actions: the work of a stage at one time, and their text form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from disttensor.checks import check_sequence

KINDS = ("F", "B", "I", "W")
_TEXT = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")
_SHOWN = 4  # most wrong actions that an error names


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of a micro-batch through a stage, on its visit ``chunk``.
    A backward may be split into two parts: the gradients of the visit's inputs ("I"), which are
    sent to the stage before, and later the gradients of its weights ("W"). If a program stays on a
    mesh without a boundary, two chunks are one visit of its graph (``MicroBatchGraph``).

    >>> print(pipeline.Action("F", 3), pipeline.Action("W", 3, chunk=1))
    F3 W3.1
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def read(order: str | Iterable[Action | str], stage: int) -> Iterator[Action]:
    """Yields the Actions of an order of texts or Actions. Raises ValueError for anything else."""
    row = order.split() if isinstance(order, str) else order
    for item in check_sequence(f"Schedule: order of stage {stage}", row, 'actions, as "F0 B0",'):
        if isinstance(item, str):
            match = _TEXT.fullmatch(item)
            if match is None:
                raise ValueError(
                    f"Schedule: {item!r} in the order of stage {stage}: write F0, B0 (or I0 and "
                    "W0), or F0.1 for chunk 1"
                )
            yield Action(match[1], int(match[2]), int(match[3] or 0))
            continue
        try:
            action = Action(*item)
            right = action.kind in KINDS and all(isinstance(n, int) and n >= 0 for n in action[1:])
        except TypeError:
            right = False
        if not right:
            raise ValueError(
                f"Schedule: {item!r} in the order of stage {stage}: an Action is 'F', 'B', 'I' or "
                "'W', a micro-batch >= 0, a chunk >= 0"
            )
        yield action


def listed(actions: list[Action]) -> str:
    return ", ".join(map(str, actions[:_SHOWN])) + (", ..." if len(actions) > _SHOWN else "")


def wrong_in(order: tuple[Action, ...], micro_batches: int, chunks: int) -> Iterator[str]:
    """Yields the errors in the order of one stage that do not depend on other stages."""
    place = {action: i for i, action in reversed(list(enumerate(order)))}
    visits = [(m, c) for m in range(micro_batches) for c in range(chunks)]
    missing = []
    both = []
    for visit in visits:
        found = {kind for kind in KINDS if Action(kind, *visit) in place}
        backward = ["I", "W"] if found & {"I", "W"} and "B" not in found else ["B"]
        missing += [Action(kind, *visit) for kind in ("F", *backward) if kind not in found]
        if "B" in found and found & {"I", "W"}:
            both.append(Action("B", *visit))
        if len(missing) > _SHOWN:
            break
    if missing:
        yield f"lacks {listed(missing[: _SHOWN + 1])}"
    if both:
        yield f"has {listed(both)} and also an I or a W of the same: a backward is B, or I and W"
    count = dict.fromkeys(order, 0)
    for action in order:
        count[action] += 1
    twice = [a for a, n in count.items() if n > 1]
    if twice:
        yield f"has {listed(twice)} more than once"

    def before(kinds: str, first: str) -> list[Action]:
        return [
            a for a in count if a.kind in kinds and place.get(a._replace(kind=first), -1) > place[a]
        ]

    early = before("BI", "F")
    if early:
        yield f"has {listed(early)} before its own forward"
    early = before("W", "I")
    if early:
        yield f"has {listed(early)} before its own I, which is to come first"
