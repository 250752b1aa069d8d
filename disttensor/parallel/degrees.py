"""Degrees: the sizes of a strategy's axes, and the groups of ranks that follow from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from disttensor.checks import check_int

AXES = ("pp", "dp", "sharding", "cp", "tp")  # outer to inner
STAGE_AXES = AXES[1:]  # of the mesh of one stage
# The first that is left out gets the remaining factor: dp and sharding ask nothing of a model.
REST = ("dp", "sharding", "tp", "cp", "pp")


class Degrees(NamedTuple):
    """The sizes of all axes, outer to inner; their product is the size of the world."""

    pp: int
    dp: int
    sharding: int
    cp: int
    tp: int

    @property
    def world(self) -> int:
        return math.prod(self)

    @property
    def nontrivial_axes(self) -> tuple[str, ...]:
        """Returns the axes of a stage that have more than one process."""
        return tuple(axis for axis in STAGE_AXES if getattr(self, axis) > 1)

    def __str__(self) -> str:
        return product_of(self._asdict())


class GroupSpec(NamedTuple):
    """A communicator: its ranks in mesh order, its mesh axes, and its purpose ("": operations)."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    purpose: str


def product_of(sizes: Mapping[str, int | None]) -> str:
    """Returns ``dp=3 x tp=2``, without degrees that are None."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size is not None)


def infer(given: Mapping[str, int | None], world: int, first: str = "dp") -> Degrees:
    """Returns the degrees in a world of this size. Given degrees are kept. Of the others, ``first``
    or else the first of ``REST`` gets the remaining factor, and the rest are 1. Raises ValueError
    if the world has no such factors.

    >>> infer({"tp": 2}, 8)
    Degrees(pp=1, dp=4, sharding=1, cp=1, tp=2)
    """
    check_int("Strategy: world", world, 1, "a number of processes")
    sizes = {axis: size for axis in AXES if (size := given.get(axis)) is not None}
    needed = math.prod(sizes.values())
    rest = next((axis for axis in (first, *REST) if axis not in sizes), None)
    if world % needed or (rest is None and needed != world):
        raise ValueError(_misfit(sizes, world, rest))
    if rest is not None:
        sizes[rest] = world // needed
    return Degrees(**{axis: sizes.get(axis, 1) for axis in AXES})


def _misfit(sizes: Mapping[str, int], world: int, rest: str | None) -> str:
    """Returns the error, with the nearest products. ``rest``: the axis of the remaining factor."""
    needed = math.prod(sizes.values())
    near = sorted(_fitting(sizes, world, rest), key=lambda item: item[0])[:6]
    shown = ", ".join(product_of(choice) for _, choice in near)
    start, needs = needed, f"exactly {needed}"
    if rest is not None:
        start, needs = -(-world // needed) * needed, f"a multiple of {needed}"
    return (
        f"Strategy: {product_of(sizes)} needs {needs} processes, and the world has {world}. Start "
        f"{start}, or choose what fits {world}: {shown}"
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _fitting(
    sizes: Mapping[str, int], world: int, rest: str | None
) -> Iterator[tuple[tuple[int, float], dict[str, int]]]:
    """Yields ((number of changed axes, size of the change), degrees) that fit the world."""
    axes = [a for a in REST[::-1] if sizes.get(a, 1) > 1] or [a for a in REST[::-1] if a in sizes]
    for values in itertools.product(divisors(world), repeat=len(axes)):
        total = math.prod(values)
        if world % total or (rest is None and total != world):
            continue
        choice = dict(zip(axes, values, strict=True))
        changed = sum(choice[axis] != sizes[axis] for axis in axes)
        by = sum(abs(math.log(choice[axis] / sizes[axis])) for axis in axes)
        if rest is not None and total < world:
            choice[rest] = world // total
        yield (
            (changed, by),
            {
                axis: choice[axis]
                for axis in AXES
                if choice.get(axis, 1) > 1
                or (choice.get(axis) != sizes.get(axis) and axis in choice)
            },
        )


def ranks_over(degrees: Degrees, stage: int, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Returns groups of ranks of a stage that differ only on ``axes``, major first."""
    ranks = np.arange(degrees.world).reshape(degrees)[stage]
    inside = [i for i, axis in enumerate(STAGE_AXES) if axis in axes]
    last = range(len(STAGE_AXES) - len(inside), len(STAGE_AXES))
    size = math.prod(ranks.shape[i] for i in inside)
    return [tuple(row) for row in np.moveaxis(ranks, inside, last).reshape(-1, size).tolist()]


def groups(degrees: Degrees) -> list[GroupSpec]:
    """Returns all communicators of a strategy, the same list on every rank.

    For each stage: all sets of axes that have more than one process, the small sets first; a
    gradient may be pending on any of them, and a loss is summed over all. Then communicators for
    collectives that overlap with the model's, by purpose: "gather" for parameters, over
    ``sharding``; "reduce" for gradients, over the same sets again; "replicas" for shards that are
    summed after.
    """
    axes = degrees.nontrivial_axes
    sets = [subset for n in range(1, len(axes) + 1) for subset in itertools.combinations(axes, n)]
    kinds = [
        *[(s, "") for s in sets],
        *[(s, "gather") for s in sets if s == ("sharding",)],
        *[(s, "reduce") for s in sets],
        *[(s, "replicas") for s in sets if "sharding" in axes and "sharding" not in s],
    ]
    return [
        GroupSpec(ranks, over, purpose)
        for stage in range(degrees.pp)
        for over, purpose in kinds
        for ranks in ranks_over(degrees, stage, over)
    ]
