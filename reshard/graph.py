"""The graph that the planner searches: layouts, and the moves between them that may lead to the
goal.

Its layouts have no mesh axes of size 1. An axis only takes its placement in the source, its
placement in the goal, and Replicate.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from disttensor.core.layout import Axes as DimAxes
from disttensor.core.layout import Layout, largest_piece, missing_numel
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from reshard.all_to_all import common, concerned, exchange
from reshard.registry import Axes, MoveFn, moves

T = TypeVar("T")
Dims = tuple[DimAxes, ...]

LATENCY = 16 * 1024  # bytes: the constant cost of a collective
STEP, EXCHANGE = 0.25, 0.5  # break ties: few steps, and plain collectives before an exchange

# Reductions of one kind may be done in any order.
REDUCTION_KIND = {"sum": 0, "avg": 0, "max": 1, "any": 1, "min": 2, "all": 2, "prod": 3}


class Edge(NamedTuple):
    """One step of a path: a move over some axes, its price, and the layout after it."""

    kind: str
    fn: MoveFn
    axes: Axes
    bytes: float
    to: Layout
    merge: object = None  # neighbours with equal values can be one step
    extra: float = 0.0


def cheapest(start: Layout, goal: Layout, mesh: Axes, shape: Axes, itemsize: int) -> list[Edge]:
    """Returns the cheapest path, by Dijkstra. Raises LookupError if there is none."""
    graph = Graph(goal, mesh, shape, itemsize)
    best: dict[Layout, float] = {start: 0.0}
    came: dict[Layout, tuple[Layout, Edge]] = {}
    done: set[Layout] = set()
    ticket = itertools.count()  # resolves ties in the same way on all ranks
    queue: list[tuple[float, int, Layout]] = [(0.0, next(ticket), start)]
    while queue:
        spent, _, state = heapq.heappop(queue)
        if state == goal:
            path = []
            while state != start:
                state, edge = came[state]
                path.append(edge)
            return path[::-1]
        if state in done:
            continue
        done.add(state)
        for edge in graph.edges(state):
            total = spent + edge.bytes + edge.extra + STEP
            if total < best.get(edge.to, float("inf")):
                best[edge.to] = total
                came[edge.to] = state, edge
                heapq.heappush(queue, (total, next(ticket), edge.to))
    raise LookupError(
        f"reshard: no path from {dict(start.custom)} to {dict(goal.custom)}: register functions "
        "for these placement types with @reshard.register, at least to and from Replicate"
    )


class Graph:
    """The moves that lead from a state towards ``goal``, with their prices."""

    def __init__(self, goal: Layout, mesh: Axes, shape: Axes, itemsize: int) -> None:
        self.goal, self.dims, self.partial = goal, goal.dims, goal.partial
        self.home = {a: d for d, axes in enumerate(self.dims) for a in axes}
        self.ops = dict(self.partial)
        self.placements = dict(goal.custom)
        self.mesh, self.shape, self.itemsize = mesh, shape, itemsize
        self.sizes: dict[Dims, int] = {}

    def edges(self, state: Layout) -> Iterator[Edge]:
        return filter(None, self.candidates(state))

    def candidates(self, state: Layout) -> Iterator[Edge | None]:
        """Yields all edges that may lead to the goal, and None for a move that is not legal."""
        mine = frozenset(a for a, _ in state.custom) | self.placements.keys()
        if state.partial:
            yield from self.reductions(state, mine)
        if state.dims != self.dims or state.custom != self.goal.custom:
            yield from self.gathers(state, mine)
        if state.dims != self.dims:
            yield from self.all_to_alls(state, mine)
            yield from self.slices(state, mine)
            yield from self.exchanges(state, mine)
        if state.partial != self.partial:
            yield from self.pendings(state, mine)
        if mine:
            yield from self.users(state, mine)

    # Each of the following yields the edges of one kind of movement -------------------------------

    def reductions(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields P -> R and P -> S, for every set of axes that wait for one reduction."""
        dims, partial = state.dims, state.partial
        blocked = len({*_pending(state).values(), *_pending(self.goal).values()}) > 1
        open_axes = [
            (a, op) for a, op in partial if a not in mine and (blocked or self.ops.get(a) != op)
        ]
        for op in dict.fromkeys(op for _, op in open_axes):
            for axes in _subsets([a for a, other in open_axes if other == op]):
                rest = tuple(entry for entry in partial if entry[0] not in axes)
                done = replace(state, partial=rest)
                yield self.edge(Partial, Replicate, axes, state, done)
                if all(a in self.home for a in axes):
                    done = replace(done, dims=self.appended(dims, axes))
                    yield self.edge(Partial, Shard, axes, state, done)

    def gathers(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields S -> R, for every set of axes that are the minor ones of their dims and not in
        place."""
        choices = []
        other = {a for a, _ in {*state.custom} ^ {*self.goal.custom}}
        for now, then in zip(state.dims, self.dims, strict=True):
            changing = [i for i, a in enumerate(now) if a in other]
            in_place = min([common(now, then), *changing])
            lowest = max([in_place, *(i + 1 for i, a in enumerate(now) if a in mine)])
            choices.append([now[:i] for i in range(lowest, len(now) + 1)])
        for after in itertools.product(*choices):
            if after != state.dims:
                axes = concerned(state.dims, after)
                yield self.edge(Shard, Replicate, axes, state, replace(state, dims=after))

    def all_to_alls(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields S(i) -> S(j) if the minor axes of dim i are then in their final place on dim j."""
        dims = state.dims
        for i, now in enumerate(dims):
            for k in range(len(now) - 1, common(now, self.dims[i]) - 1, -1):
                axes = now[k:]
                j = self.home.get(axes[0])
                if j is None or j == i or not mine.isdisjoint(axes):
                    continue
                there = dims[j] + axes
                if there == self.dims[j][: len(there)]:
                    after = tuple(
                        there if d == j else now[:k] if d == i else old
                        for d, old in enumerate(dims)
                    )
                    yield self.edge(Shard, Shard, axes, state, replace(state, dims=after))

    def slices(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields R -> S if an axis is then in its final place."""
        dims, used = state.dims, state.varies() | mine
        for d, (now, then) in enumerate(zip(dims, self.dims, strict=True)):
            if len(now) < len(then) and then[: len(now)] == now:
                axis = then[len(now)]
                if axis not in used:
                    to = replace(state, dims=(*dims[:d], (*now, axis), *dims[d + 1 :]))
                    yield self.edge(Replicate, Shard, (axis,), state, to, "slice")

    def pendings(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields R -> P and S -> P, one axis at a time: they are local."""
        for axis, op in self.partial:
            if axis in state.partial_axes | mine:
                continue
            left = _without(state.dims, axis)
            if left is not None:
                before = Replicate if left == state.dims else Shard
                to = replace(state, dims=left, partial=tuple(sorted((*state.partial, (axis, op)))))
                yield self.edge(before, Partial, (axis,), state, to, (before, op))

    def exchanges(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields one exchange to the goal for all axes without a pending reduction."""
        dims, left_out = state.dims, state.partial_axes | self.placements.keys()
        after = tuple(tuple(a for a in axes if a not in left_out) for axes in self.dims)
        axes = concerned(dims, after)
        if axes and mine.isdisjoint(axes):
            price = missing_numel(self.shape, dims, after, self.mesh) * self.itemsize
            to = replace(state, dims=after)
            yield Edge("all_to_all", exchange, axes, price, to, extra=LATENCY + EXCHANGE)

    def users(self, state: Layout, mine: frozenset[int]) -> Iterator[Edge | None]:
        """Yields moves of users' placement types: one axis at a time, by the registry."""
        for axis in sorted(mine):
            left = _without(state.dims, axis)
            if left is None:
                continue
            bare = Layout(left, _drop(state.partial, axis), _drop(state.custom, axis))
            now = placement_at(state, axis)
            for then in (Replicate(), placement_at(self.goal, axis)):
                if now != then and (type(now), type(then)) in moves:
                    to = placed(bare, axis, then)
                    yield self.edge(type(now), type(then), (axis,), state, to)

    # Prices ---------------------------------------------------------------------------------------

    def edge(
        self, src: type[Placement], dst: type[Placement], axes: Axes, here: Layout, to: Layout,
        merge: object = None,
    ) -> Edge | None:  # fmt: skip
        """Returns the edge; None if it reduces, or makes pending, an axis while a reduction of
        another kind is pending inside: inner axes are reduced first, and made pending last. A piece
        becomes no pending average: times the number of ranks it may overflow."""
        before, after = _pending(here), _pending(to)
        if any(
            b > a and other != kind
            for changed, rest in ((before, after), (after, before))
            for a, kind in changed.items() - rest.items()
            for b, other in rest.items()
        ):
            return None
        made = {op for a, op in to.partial if a in axes and dst is Partial}
        if "avg" in made and src is not Replicate:
            return None
        move = moves[src, dst]
        ranks = math.prod(self.mesh[a] for a in axes)
        sent, left = (self.numel(x.dims) * self.itemsize for x in (here, to))
        price, extra = move.cost(sent, left, ranks), LATENCY if move.collective else 0
        return Edge(move.kind, move.fn, tuple(sorted(axes)), price, to, merge, extra)

    def numel(self, dims: Dims) -> int:
        """Returns the elements of the first rank's local, the largest."""
        n = self.sizes.get(dims)
        if n is None:
            pieces = (
                largest_piece(s, axes, self.mesh) for s, axes in zip(self.shape, dims, strict=True)
            )
            n = self.sizes[dims] = math.prod(pieces)
        return n

    def appended(self, dims: Dims, axes: Axes) -> Dims:
        """Returns the dims with ``axes`` appended where the goal has them, in its order."""
        pairs = zip(dims, self.dims, strict=True)
        return tuple((*now, *(a for a in then if a in axes)) for now, then in pairs)


def placed(layout: Layout, axis: int, placement: Placement) -> Layout:
    """Returns ``layout`` with a placement on ``axis``, which was replicated."""
    dims, partial, own = layout.dims, layout.partial, layout.custom
    if isinstance(placement, Shard):
        d = placement.dim % len(dims)
        dims = (*dims[:d], (*dims[d], axis), *dims[d + 1 :])
    elif isinstance(placement, Partial):
        partial = tuple(sorted((*partial, (axis, placement.reduce_op))))
    if type(placement) not in (Shard, Replicate, Partial):
        own = tuple(sorted((*own, (axis, placement)), key=lambda entry: entry[0]))
    return Layout(dims, partial, own)


def placement_at(layout: Layout, axis: int) -> Placement:
    """Returns the placement, without the order of axes on one dim."""
    for a, placement in layout.custom:
        if a == axis:
            return placement
    for a, op in layout.partial:
        if a == axis:
            return Partial(op)
    d = layout.dim_of(axis)
    return Replicate() if d is None else Shard(d)


def _drop(entries: tuple[tuple[int, T], ...], axis: int) -> tuple[tuple[int, T], ...]:
    return tuple(entry for entry in entries if entry[0] != axis)


def _without(dims: Dims, axis: int) -> Dims | None:
    """Returns ``dims`` without ``axis``; None if it is not the minor axis of its dim."""
    for d, axes in enumerate(dims):
        if axis in axes:
            return (*dims[:d], axes[:-1], *dims[d + 1 :]) if axes[-1] == axis else None
    return dims


def _pending(layout: Layout) -> dict[int, int]:
    """Returns the kind of reduction that is pending on each axis. A user's own reduction has a kind
    of its own on each axis, so it keeps its place among the others."""
    own = {a: -1 - a for a, p in layout.custom if isinstance(p, Partial)}
    return own | {a: REDUCTION_KIND[op] for a, op in layout.partial}


def _subsets(axes: list[int]) -> Iterator[Axes]:
    for n in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, n)
