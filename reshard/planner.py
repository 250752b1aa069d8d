"""The planner: finds the cheapest steps from one spec to another on its mesh, the same on every
rank.

A shortest-path search over layouts. An edge is one registered move (see graph.py); its length is
the bytes that a rank sends, plus a constant per collective, so that equal collectives become one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttensor.cache import cached
from disttensor.comm.work import Work
from disttensor.core.layout import Layout
from disttensor.core.spec import DistSpec
from ops.traffic import WORTH
from reshard.all_gather import all_gather
from reshard.all_to_all import all_to_all, exchange
from reshard.graph import Edge, cheapest
from reshard.reductions import all_reduce, reduce_scatter
from reshard.registry import Axes, How, MoveFn, Tensor
from reshard.validate import check

# The functions that can run in the background: they take a How.
STARTABLE = {all_gather, all_reduce, all_to_all, exchange, reduce_scatter}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reshard.

    ``kind``: "all_gather", "all_reduce", "reduce_scatter", "all_to_all" (the names that
    ``record_comms`` uses), or "slice", "to_partial", "local", which send nothing; "send_recv", from
    one mesh to another, is recorded as a "send" for each message. ``axis``: the names of ``axes``,
    as "dp+tp". ``bytes``: sent by one rank (for uneven shards the first rank, which holds most; for
    a send_recv the rank that sends most).
    """

    kind: str
    axis: str
    axes: Axes
    bytes: int
    src: DistSpec
    dst: DistSpec
    fn: MoveFn

    def __str__(self) -> str:
        price = f"{self.bytes:,} bytes" if self.bytes else "local"
        over = f" over {self.axis}" if self.axis else ""
        return f"{self.kind}{over}: {self.src!r} -> {self.dst!r} ({price})"


def stay(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
    """Returns x, or an empty tensor: only mesh axes of size 1 differ, or there are no elements."""
    return x if x.shape == dst.local_shape else x.new_empty(dst.local_shape)


@cached(4096)
def choose(src: DistSpec, dst: DistSpec) -> tuple[Step, ...]:
    """Implements ``reshard.choose`` within one mesh."""
    assert src.mesh is dst.mesh
    if src is dst:
        return ()
    check(src, dst)
    mesh = src.mesh
    start, goal = essential(src), essential(dst)
    if start == goal or not src.shape.numel():
        changed = differing(src, dst)
        return (Step("local", name_of(src, changed), changed, 0, src, dst, stay),)
    path = merged(cheapest(start, goal, mesh.shape, tuple(src.shape), src.dtype.itemsize))
    steps: list[Step] = []
    here = src
    for i, edge in enumerate(path):
        last = i == len(path) - 1
        there = dst if last else src.with_layout(edge.to)
        name = name_of(src, edge.axes)
        steps.append(Step(edge.kind, name, edge.axes, round(edge.bytes), here, there, edge.fn))
        here = there
    return tuple(steps)


def run(local: Tensor, src: DistSpec, dst: DistSpec) -> Tensor:
    """Implements ``reshard.run`` within one mesh."""
    return local if src is dst else runner(src, dst)(local)


@cached(4096)
def runner(src: DistSpec, dst: DistSpec) -> Callable[[Tensor], Tensor]:
    """Returns the function that ``run`` applies to a local of ``src``. It makes no further
    decision."""
    if src.mesh.coordinate is None:
        return lambda local: local.new_empty(dst.local_shape)
    steps = choose(src, dst)
    shape, first = src.local_shape, steps[0]
    fn, ends = first.fn, (first.src, first.dst, first.axes)

    def one(local: Tensor) -> Tensor:
        if local.shape != shape:
            check_local(local, src)
        return fn(local, *ends)

    def several(local: Tensor) -> Tensor:
        check_local(local, src)
        for step in steps:
            local = step.fn(local, step.src, step.dst, step.axes)
        return local.contiguous()

    return one if len(steps) == 1 else several


def check_local(local: Tensor, src: DistSpec) -> None:
    """Raises ValueError for a local that is not this rank's piece of ``src``."""
    if local.shape != src.local_shape:
        raise ValueError(
            f"reshard: the local tensor has shape {tuple(local.shape)}, but this rank's piece "
            f"of {src!r} is {src.local_shape}; nothing was moved"
        )


@cached(4096)
def background(
    src: DistSpec, dst: DistSpec, copies: bool = False
) -> Callable[[Tensor], Work[Tensor]] | None:
    """Returns the function that starts ``run`` in the background; None if it takes several steps,
    or sends too few bytes to be worth the overhead. ``copies``: the local may be written to
    meanwhile, so it is not read after the start."""
    steps = choose(src, dst)
    if len(steps) != 1 or steps[0].bytes < WORTH:
        return None
    (step,) = steps
    if step.fn not in STARTABLE:
        return None
    start: Any = step.fn
    return lambda x: start(x, step.src, step.dst, step.axes, How(True, copies))


def essential(spec: DistSpec) -> Layout:
    """Returns the layout without mesh axes of size 1, which do not change the data."""
    sizes, layout = spec.mesh.shape, spec.layout
    return Layout(
        tuple(tuple(a for a in axes if sizes[a] > 1) for axes in layout.dims),
        tuple(entry for entry in layout.partial if sizes[entry[0]] > 1),
        tuple(entry for entry in layout.custom if sizes[entry[0]] > 1),
    )


def differing(src: DistSpec, dst: DistSpec) -> Axes:
    pairs = zip(src.placements, dst.placements, strict=True)
    return tuple(a for a, (before, after) in enumerate(pairs) if before != after)


def name_of(spec: DistSpec, axes: Axes) -> str:
    return "+".join(spec.mesh.dim_names[a] for a in axes)


def merged(path: list[Edge]) -> list[Edge]:
    """Merges adjacent local steps that one function can run at once."""
    out: list[Edge] = []
    for edge in path:
        before = out[-1] if out else None
        if before and before.merge and before.merge == edge.merge:
            axes = tuple(sorted(before.axes + edge.axes))
            out[-1] = Edge(edge.kind, edge.fn, axes, 0.0, edge.to, edge.merge)
        else:
            out.append(edge)
    return out
