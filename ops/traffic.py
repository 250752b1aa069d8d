"""Traffic: the bytes that one rank receives to reshard an input of a call to the required layout,
and in the backward to reshard its gradient to the layout of the input.

    an input                        forward                backward
    P -> R                          2 (n - 1) / n          the same, if the call varies on the axis
    P -> S(d)                       (n - 1) / n            the same: an all-gather
    S(d) -> R                       (n - 1) / n            the same, if the call varies on the axis
    S(i) -> S(j)                    (n - 1) / n of 1 / n   the same
    R -> S(d), R -> P, S(d) -> P    none                   not counted

as shares of the input after its splits by other axes, over an axis of n ranks. The gradient of a
replicated input is not counted, however the input is split: it is a contribution, which stays
pending with the other contributions until the gradient is read. An input of integers has no
gradient.

The planner (``reshard``) takes these paths, or one exchange of all elements that a rank lacks. If a
sum is pending on one axis while other axes move, the better of two orders counts: all sums first,
or all other steps first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from itertools import takewhile
from typing import Any

from disttensor.core.layout import Axes, Layout, largest_piece, missing_numel

Dims = tuple[Axes, ...]

WORTH = 128 * 1024  # bytes of a rank: smaller collectives do not run in the background


def traffic(arg: Any, want: Layout, varying: Axes, mesh_shape: Axes) -> float:
    """Returns the bytes of an ``Arg`` in forward and backward. ``varying``: the axes over which the
    call varies while the argument is replicated, so that its gradient is a sum."""
    have, dtype = arg.layout, arg.dtype
    if have == want:
        return 0.0
    moved = received(arg.shape, have, want, mesh_shape)
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        came = have.varies()
        sums = tuple((a, "sum") for a in sorted(varying))
        left = tuple((a, op) for a, op in sums if a not in came)
        home = Layout(tuple(map(returned, have.dims, want.dims, [came] * len(have.dims))), left)
        moved += received(arg.shape, Layout(want.dims, sums), home, mesh_shape)
    return moved * (4 if dtype is None else dtype.itemsize)


def returned(now: Axes, then: Axes, came: Iterable[int]) -> Axes:
    """Returns the axes that split the gradient of a dim after the backward. The dim was split by
    ``now`` and required to be split by ``then``: the gradient is split by ``now``, and still by the
    axes on which the input was replicated."""
    kept = tuple(a for a in then if a in now or a not in came)
    if tuple(a for a in kept if a in now) == now:
        return kept
    return now + tuple(a for a in kept if a not in now)


def received(shape: Axes, have: Layout, want: Layout, mesh_shape: Axes) -> float:
    """Returns how many elements one rank receives in a reshard from one layout to another."""
    done = have.partial_axes - want.partial_axes
    joined = want.partial_axes - have.partial_axes
    pairs = [zeroed(h, w, joined) for h, w in zip(have.dims, want.dims, strict=True)]
    came, goal = tuple(h for h, _ in pairs), tuple(w for _, w in pairs)
    if not done:
        return missing_numel(shape, came, goal, mesh_shape)

    def ranks(axes: Iterable[int]) -> int:
        return math.prod(mesh_shape[a] for a in axes)

    def by_way_of(start: Dims) -> float:
        cut = tuple(s + tuple(a for a in t if a in done) for s, t in zip(start, goal, strict=True))
        scattered = {a for axes in goal for a in axes if a in done}
        pairs = zip(shape, cut, strict=True)
        piece = math.prod(largest_piece(n, axes, mesh_shape) for n, axes in pairs)
        reduced = ranks(scattered) - 1 + 2 - 2 / ranks(done - scattered)
        moves = ((came, start), (cut, goal))
        return reduced * piece + sum(missing_numel(shape, a, b, mesh_shape) for a, b in moves)

    taken = have.sharded | done
    sliced = tuple(further(h, w, lambda a: a not in taken) for h, w in zip(came, goal, strict=True))
    moved = tuple(further((), w, lambda a: a not in done) for w in goal)
    return min(by_way_of(sliced), by_way_of(moved))


def zeroed(now: Axes, then: Axes, joined: Container[int]) -> tuple[Axes, Axes]:
    """Returns the axes of a dim on both sides after axes of ``joined`` were filled up with zeros:
    last, or first if others will split the dim. None is while an axis that stays has cut its
    piece."""
    free = [a for i, a in enumerate(now) if a in joined and not set(now[i:]) & set(then)]
    if set(then) <= set(now):
        return now, tuple(a for a in now if a in free or a in then) if free else then
    return tuple(a for a in now if a not in free), then


def further(now: Axes, then: Axes, may: Callable[[int], bool]) -> Axes:
    """Returns the axes of a dim after adding as many of ``then`` as possible."""
    return now + tuple(takewhile(may, then[len(now) :])) if then[: len(now)] == now else now
