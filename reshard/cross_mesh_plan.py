"""Plans a reshard to another mesh: the steps before, the messages, and the steps after them.

    src --choose, on its mesh--> before --messages--> after --local, on the other mesh--> dst

The plan is the same on every rank. Its cost counts the messages of all ranks, so reductions run
where this sum is smallest: nearly always before the messages, on the source mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from disttensor.cache import cached
from disttensor.core.layout import Layout
from disttensor.core.spec import DistSpec
from reshard import planner
from reshard.graph import REDUCTION_KIND
from reshard.registry import Axes
from reshard.routing import Routing, between
from reshard.validate import check

Reductions = tuple[tuple[int, str], ...]


@dataclass(frozen=True, eq=False, slots=True)
class CrossMeshPlan:
    """The steps and messages of a reshard from ``src`` to ``dst`` on another mesh.

    ``before``: the spec to which src is resharded on its own mesh. ``after``: the spec that
    arrives. If dst has a pending reduction that ``before`` does not have (its axes are ``once``),
    only the first rank of the axis receives the value, and the others take the neutral element.
    ``routing``: the messages between the two.
    """

    src: DistSpec
    dst: DistSpec
    before: DistSpec
    after: DistSpec
    once: Reductions
    routing: Routing

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all messages."""
        return self.routing.elements * self.src.dtype.itemsize

    @property
    def most(self) -> int:
        """Returns the bytes of the rank that sends most."""
        return max(self.routing.sent.values()) * self.src.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.src!r} on {self.src.mesh!r} -> {self.dst!r} on {self.dst.mesh!r}"


@cached(1024)
def plan_between(src: DistSpec, dst: DistSpec) -> CrossMeshPlan:
    """Returns the cheapest plan: fewest bytes on the wire, then fewest messages.

    Raises ValueError for specs that do not fit.
    """
    check(src, dst)
    best: tuple[int, int, CrossMeshPlan] | None = None
    for kept in dict.fromkeys((_staying(src, dst), ())):
        after = _arriving(dst, kept)
        once = tuple(entry for entry in after.layout.partial if entry not in kept)
        for before in _ready(src, kept):
            routes = between(before, after, _axes(kept), _axes(once))
            one = CrossMeshPlan(src, dst, before, after, once, routes)
            reducing = sum(step.bytes for step in planner.choose(src, before))
            price = reducing * src.mesh.size + one.nbytes
            if best is None or (price, len(routes.messages)) < best[:2]:
                best = price, len(routes.messages), one
    assert best is not None
    return best[2]


def _arriving(dst: DistSpec, kept: Reductions) -> DistSpec:
    """Returns dst without users' own placements, and without averages that are not ``kept``: a
    replicated value becomes a pending average."""
    layout = planner.essential(dst)
    theirs = set(_axes(layout.custom))
    late = {entry for entry in layout.partial if entry[1] == "avg"} - {*kept}
    made = tuple(e for e in layout.partial if e[0] not in theirs and e not in late)
    dims = tuple(_until(axes, theirs) for axes in dst.layout.dims)
    return dst.with_layout(Layout(dims, made))


def _staying(src: DistSpec, dst: DistSpec) -> Reductions:
    """Returns the reductions that may be sent unreduced: on equal meshes, in any order."""
    layout, made = planner.essential(src), planner.essential(dst).partial
    made = _arriving(dst, made).layout.partial
    partial, own = layout.partial, layout.custom
    if src.mesh.shape != dst.mesh.shape:
        return ()
    mine = set(_axes(own))
    both = tuple(entry for entry in partial if entry in made and entry[0] not in mine)
    one_kind = len({REDUCTION_KIND[op] for _, op in (*partial, *made)}) == 1
    return both if one_kind or partial == made == both else ()


def _axes(entries: Sequence[tuple[int, object]]) -> Axes:
    return tuple(axis for axis, _ in entries)


def _ready(src: DistSpec, kept: Reductions) -> list[DistSpec]:
    """Returns the specs to which src may be resharded: only the ``kept`` reductions are pending."""
    layout = planner.essential(src)
    dims = tuple(_until(axes, set(_axes(layout.custom))) for axes in src.layout.dims)
    waiting = tuple(a for a, op in layout.partial if (a, op) not in kept)
    out = [src.with_layout(Layout(dims, kept))]
    for d in range(src.ndim if waiting else 0):
        split = (*dims[:d], dims[d] + waiting, *dims[d + 1 :])
        out.append(src.with_layout(Layout(split, kept)))
    return out


def _until(axes: Axes, stop: set[int]) -> Axes:
    """Returns the leading axes, up to the first that is in ``stop``."""
    return tuple(itertools.takewhile(lambda a: a not in stop, axes))
