"""How few micro-batches show what all of them do.

What a rank does in a forward or a backward depends on what comes before and after it in its
schedule: whether it is the first, the second or the last of its kind, and the kinds of its two
neighbours. That is its *situation*. So a run with few micro-batches, in which each situation of the
schedule is there once, shows all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from disttensor.comm import p2p
from disttensor.pipeline import Action

_OTHERS = 2  # of so many before it an action is told apart


def situations(row: Sequence[Action]) -> list[Hashable]:
    """Of each action in the order of a stage."""
    kinds = [(a.kind, a.chunk) for a in row]
    left, seen = Counter(kinds), Counter[Any]()
    out: list[Hashable] = []
    for before, kind, after in zip([None, *kinds], kinds, [*kinds[1:], None], strict=False):
        left[kind] -= 1
        out.append((before, kind, after, min(seen[kind], _OTHERS), left[kind] > 0))
        seen[kind] += 1
    return out


def left_out(row: Sequence[Action], shown: bool = True) -> dict[int, int]:
    """The micro-batches that need not run, each with one that stands for its loss. Where nobody
    looks at what is ``shown``, in a step before the one that is recorded, the ends suffice."""
    numbers = sorted({a.micro_batch for a in row})
    if len(numbers) >= p2p.CHANNELS:  # some would share the numbers of their messages
        return {}
    # the engine reduces gradients in the last backward of each visit
    ends = {row[0].micro_batch, *{(a.kind, a.chunk): a.micro_batch for a in row}.values()}
    kept = _enough(row, ends) if shown else set(ends)
    for n in sorted(kept - ends):
        if not _missing(row, kept - {n}):
            kept.remove(n)
    return {n: max(k for k in kept if k < n) for n in numbers if n not in kept}


def _enough(row: Sequence[Action], ends: set[int]) -> set[int]:
    """Micro-batches among which every situation is: to ``ends`` come, again and again, an action
    whose situation is missing and its neighbours."""
    kept, there = set(ends), situations(row)
    while missing := _missing(row, kept):
        ways = [kept | {min({a.micro_batch for a in row} - kept)}]
        for situation in missing:
            first = there.index(situation)
            last = len(row) - 1 - there[::-1].index(situation)
            for at in (first, last):
                ways.append(kept | {a.micro_batch for a in row[max(0, at - 1) : at + 2]})
        new = [way for way in ways if way != kept]
        kept = min(new, key=lambda way: (len(_missing(row, way)), sorted(way)))
    return kept


def _missing(row: Sequence[Action], kept: Collection[int]) -> set[Hashable]:
    """The situations that these micro-batches do not come to."""
    return set(situations(row)).difference(situations([a for a in row if a.micro_batch in kept]))
