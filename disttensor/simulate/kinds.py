"""Which ranks do the same, from their coordinates: those of one stage, with pieces of one size,
that send and receive as much.

What makes ranks different is found by running some of them: rank 0 first, then one of each kind
that its run has shown, until no run shows another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disttensor.comm.log import CommLog
from disttensor.core.layout import box_at
from disttensor.core.mesh import ProcessMesh
from disttensor.runtime import current_runtime
from disttensor.simulate.equal_stages import alike, followed, followers
from disttensor.simulate.events import Collective, Event
from disttensor.simulate.grid import Grid
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.visits import PipelineRun
from disttensor.tensor.base import MeshTensor
from reshard.cross_mesh_plan import CrossMeshPlan

Axes = tuple[int, ...]
Shape = tuple[int, ...]
Volume = tuple[tuple[int, ...], tuple[int, ...]]  # elements of the messages sent, and received


@dataclass
class Differences:
    """What makes ranks different.

    pieces   of each mesh: sizes of dims that the axes do not split into equal pieces
    numbered of each mesh: axes on which neighbours exchange unlike pieces, so that places matter
    volumes  for each transfer between meshes: what each rank sends and receives
    sources  ranks that tell all others what they alone know
    stages   of each pipeline run: the meshes of its stages
    work     of each mesh, by its ranks: its parameters, and what its modules call
    """

    pieces: dict[Grid, set[tuple[int, Axes]]] = field(default_factory=dict)
    numbered: dict[Grid, set[Axes]] = field(default_factory=dict)
    volumes: set[frozenset[tuple[int, Volume]]] = field(default_factory=set)
    sources: set[int] = field(default_factory=set)
    stages: set[tuple[Grid, ...]] = field(default_factory=set)
    work: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    def update(self, other: Differences) -> None:
        for grid, pieces in other.pieces.items():
            self.pieces.setdefault(grid, set()).update(pieces)
        for grid, axes in other.numbered.items():
            self.numbered.setdefault(grid, set()).update(axes)
        self.volumes |= other.volumes
        self.sources |= other.sources
        self.stages |= other.stages
        for ranks, work in other.work.items():
            self.work.setdefault(ranks, work)  # rank 0 is in one stage, and looks at all others

    def groups(self, world: int) -> list[list[int]]:
        """The ranks of each kind, in order of their first."""
        keys: list[list[Any]] = [[] for _ in range(world)]
        for number, (grid, pieces) in enumerate(self.pieces.items()):
            if grid.ranks == tuple(range(world)) and not pieces and grid not in self.numbered:
                continue
            sizes: dict[Any, int] = {}
            split, numbered = sorted(pieces), sorted(self.numbered.get(grid, ()))
            for rank, place in grid.places().items():
                keys[rank].append(number)
                for size, axes in split:
                    at = size, axes, tuple([place[a] for a in axes])
                    if at not in sizes:
                        sizes[at] = box_at((size,), (axes,), grid.shape, place).shape[0]
                    keys[rank].append(sizes[at])
                for axes in numbered:
                    keys[rank].append(tuple([place[a] for a in axes]))
        for number, volumes in enumerate(self.volumes):
            for rank, volume in volumes:
                keys[rank].append((number, volume))
        kinds: dict[Any, list[int]] = {}
        for rank, key in enumerate(keys):
            kinds.setdefault((*key, rank if rank in self.sources else None), []).append(rank)
        return list(kinds.values())


class Listener(CommLog):
    """The collectives of a rank, and what they say of how ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes: set[frozenset[tuple[int, Volume]]] = set()
        self.sources: set[int] = set()
        self.work: dict[tuple[int, ...], list[Any]] = {}
        self._owned: set[int] = set()
        self._known: set[int] = set()
        self._plans: list[CrossMeshPlan] = []  # ids are theirs as long as they live

    def transfer(self, label: object, sources: Any) -> None:
        if not isinstance(label, CrossMeshPlan):
            self.sources.update(sources)
        elif id(label) not in self._known:
            self._known.add(id(label))
            self._plans.append(label)
            self.volumes.add(_volumes(label))

    def traced(self, mesh: ProcessMesh, calls: Sequence[Any]) -> None:
        self.work.setdefault(mesh.ranks, []).append(tuple(calls))

    def optimizes(self, parameters: Iterable[Any]) -> None:
        """An optimizer takes a step with these."""
        for p in parameters:
            if isinstance(p, MeshTensor) and id(p) not in self._owned:
                self._owned.add(id(p))
                spec = p.spec
                own = spec.shape, spec.layout, spec.dtype, p.requires_grad
                self.work.setdefault(spec.mesh.ranks, []).append(own)


def _volumes(plan: CrossMeshPlan) -> frozenset[tuple[int, Volume]]:
    out: dict[int, tuple[list[int], list[int]]] = {}
    for (sender, receiver), box in plan.routing.messages.items():
        for rank, way in ((sender, 0), (receiver, 1)):
            out.setdefault(rank, ([], []))[way].append(box.numel)
    return frozenset((r, (tuple(sorted(s)), tuple(sorted(g)))) for r, (s, g) in out.items())


def differences(
    listener: Listener, events: Iterable[Event], runs: Iterable[PipelineRun]
) -> Differences:
    """What the run of one rank has shown. Called in its world."""
    out = Differences(volumes=listener.volumes, sources=listener.sources, work=listener.work)
    out.stages = {run.grids for run in runs}
    for mesh in list(current_runtime().meshes.values()):
        if not mesh.specs:
            continue
        grid = Grid.of(mesh)
        found = out.pieces.setdefault(grid, set())
        for spec in list(mesh.specs.values()):
            for size, axes in zip(spec.shape, spec.layout.dims, strict=True):
                parts = 1
                for a in axes:
                    parts *= mesh.shape[a]
                if size % parts:
                    found.add((size, axes))
        for event in events:
            if isinstance(event, Collective) and event.uneven and mesh.coordinate is not None:
                axes = _axes_of(mesh, event.ranks)
                if axes:
                    out.numbered.setdefault(grid, set()).add(axes)
    return out


def _axes_of(mesh: ProcessMesh, ranks: tuple[int, ...]) -> Axes:
    """The axes on which these ranks of the mesh differ; none where they are not all along them."""
    if not set(ranks) <= set(mesh.ranks):
        return ()
    places = [mesh.coordinate_of(rank) or () for rank in ranks]
    axes = tuple(a for a in range(mesh.ndim) if len({place[a] for place in places}) > 1)
    along = 1
    for a in axes:
        along *= mesh.shape[a]
    return axes if along == len(ranks) else ()


def representatives(
    world: int, wanted: Iterable[int] | None, run: Callable[[int], tuple[RankRun, Differences]]
) -> list[tuple[list[int], int, RankRun]]:
    """(ranks of the kind, the one that was run, what it did) for each kind. Of stages that do the
    same two are run, and the others follow."""
    known, results = Differences(), dict[int, RankRun]()
    compared, odd = set[tuple[int, int]](), set[int]()  # pairs of ranks; stages by themselves
    asked = None if wanted is None else set(wanted)
    while True:
        groups = known.groups(world)
        if asked is not None:
            groups = [kept for g in groups if (kept := [r for r in g if r in asked])]
        missing = [g[0] for g in groups if not any(r in results for r in g)]
        if not missing:
            return [
                (g, r, results[r]) for g in groups for r in [next(x for x in g if x in results)]
            ]
        follow = {f.rank: f for f in followers(known.stages, known.work, groups, odd)}
        alone = [r for r in missing if r not in follow]
        if alone:
            results[alone[0]], found = run(alone[0])
            known.update(found)
            continue
        for rank in missing:
            one = follow[rank]
            ends = results[one.first], results[one.last]
            if (one.first, one.last) not in compared and not alike(*ends, one):
                odd.add(one.suspect)
                break
            compared.add((one.first, one.last))
            try:
                results[rank] = followed(*ends, one)
            except ValueError:
                odd.add(one.stage)
                break
