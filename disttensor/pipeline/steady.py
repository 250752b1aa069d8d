"""Shared parts of schedules: alternating forwards and backwards, groups of micro-batches."""

from __future__ import annotations

from itertools import chain, pairwise

from disttensor.checks import check_int
from disttensor.pipeline.action import Action


def alternate(forwards: list[Action], backwards: list[Action], warm: int) -> list[Action]:
    """Returns ``warm`` forwards, then a forward and a backward in turn, then more backwards."""
    warm = min(warm, len(forwards))
    steady = len(forwards) - warm
    turns = zip(forwards[warm:], backwards[:steady], strict=True)
    return [*forwards[:warm], *chain.from_iterable(turns), *backwards[steady:]]


def one_visit(
    name: str, instead: str, stages: int, micro_batches: int, chunks: int
) -> list[list[Action]]:
    """Returns the order of each stage in 1F1B. Raises ValueError for several visits."""
    sizes(stages, micro_batches, chunks)
    if chunks != 1:
        raise ValueError(f"{name!r} visits each stage once, and chunks={chunks}: use {instead}")
    forwards = [Action("F", m) for m in range(micro_batches)]
    backwards = [Action("B", m) for m in range(micro_batches)]
    return [alternate(forwards, backwards, stages - 1 - s) for s in range(stages)]


def groups_of(stages: int, micro_batches: int) -> list[range]:
    """Returns micro-batches in groups of ``stages``. If ``stages`` does not divide their number,
    the groups are larger and nearly equal: smaller groups would idle longer."""
    number = max(1, micro_batches // stages)
    cuts = [micro_batches * i // number for i in range(number + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def interleaved(stages: int, micro_batches: int, chunks: int, ahead: int) -> list[list[Action]]:
    """Returns the order of each stage, group by group: forwards of earlier chunks, ``ahead`` more
    for each later stage, then a forward and a backward in turn."""
    groups = groups_of(stages, micro_batches)
    forwards = [Action("F", m, c) for g in groups for c in range(chunks) for m in g]
    backwards = [Action("B", m, c) for g in groups for c in reversed(range(chunks)) for m in g]
    warm = (chunks - 1) * max(map(len, groups))
    later = reversed(range(stages))  # the number of later stages
    return [alternate(forwards, backwards, warm + ahead * n) for n in later]


def sizes(stages: int, micro_batches: int, chunks: int) -> None:
    for name, size in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        check_int(f"a schedule: {name}", size, 1)
