"""The facts by which the ranks of a world differ, and the kinds that follow from them: ranks of one
stage, with pieces of equal sizes, that send and receive the same amounts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disttensor.comm.log import CommRecord
from disttensor.comm.process_group import world
from disttensor.core.layout import box_at
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import user_line
from disttensor.observe import Observer
from disttensor.runtime import current_runtime
from disttensor.simulate.events import Collective
from disttensor.simulate.rank_run import Entry, Grid, PipelineRun
from disttensor.tensor.base import MeshTensor
from reshard.cross_mesh_plan import CrossMeshPlan

Axes = tuple[int, ...]
Volume = tuple[tuple[int, ...], tuple[int, ...]]  # elements of the messages sent, and received


@dataclass
class Differences:
    """The facts by which ranks differ.

    pieces   of each mesh: sizes of dims that the axes do not split into equal pieces
    numbered of each mesh: axes on which ranks exchange amounts that do not follow from the sizes of
             their pieces, so that the coordinates matter
    volumes  for each transfer between meshes: the amounts that each rank sends and receives
    sources  ranks that broadcast values to all others
    stages   of each pipeline run: the meshes of its stages
    work     of each mesh, by its ranks: its parameters, and the calls of its modules
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
            self.work.setdefault(ranks, work)  # rank 0 is in one stage, and traces all others

    def groups(self, world: int) -> list[list[int]]:
        """Returns the ranks of each kind, ordered by their first rank."""
        keys: list[list[Any]] = [[] for _ in range(world)]
        for number, (grid, pieces) in enumerate(self.pieces.items()):
            if grid.ranks == tuple(range(world)) and not pieces and grid not in self.numbered:
                continue
            sizes: dict[Any, int] = {}
            split, numbered = sorted(pieces), sorted(self.numbered.get(grid, ()))
            for rank, place in grid.coordinates().items():
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


class DifferenceLog(Observer):
    """Records the differences between ranks that the collectives of a rank show. ``add`` receives
    each CommRecord; ``unanswered`` is the one whose operator has not been called yet."""

    def __init__(self, add: Callable[[CommRecord], None]) -> None:
        self.add = add
        self.unanswered: CommRecord | None = None
        self.found = Differences()
        self.exchanged: list[str] = []  # values that other ranks may have otherwise
        self._owned: set[int] = set()
        self._known: dict[int, CrossMeshPlan] = {}  # by id; an id is valid while its plan is alive

    def communicate(self, record: CommRecord) -> None:
        self.add(record)
        self.unanswered = record

    def transfer(self, label: object, sources: Any) -> None:
        if not isinstance(label, CrossMeshPlan):
            self.found.sources.update(sources)
        elif id(label) not in self._known:
            self._known[id(label)] = label
            self.found.volumes.add(_volumes(label))

    def exchange_own(self, value: Any) -> None:
        self.exchanged.append(f"{value} ({user_line()})")

    def trace_module(self, mesh: ProcessMesh, calls: Sequence[Any]) -> None:
        self.found.work.setdefault(mesh.ranks, []).append(tuple(calls))

    def add_optimized(self, parameters: Iterable[Any]) -> None:
        """Adds the parameters of an optimizer step to the work of their meshes."""
        for p in parameters:
            if isinstance(p, MeshTensor) and id(p) not in self._owned:
                self._owned.add(id(p))
                spec = p.spec
                own = spec.shape, spec.layout, spec.dtype, p.requires_grad
                self.found.work.setdefault(spec.mesh.ranks, []).append(own)

    def differences(self, log: Iterable[Entry], runs: Iterable[PipelineRun]) -> Differences:
        """Returns the differences that the run of one rank shows. Call it in the world of that
        rank."""
        out = self.found
        out.stages = {run.grids for run in runs}
        uneven = {(e.ranks, e.uneven) for e in log if isinstance(e, Collective) and e.uneven}
        for mesh in list(current_runtime().meshes.values()):
            if not mesh.specs:
                continue
            grid = Grid.of(mesh)
            found = out.pieces.setdefault(grid, set())
            for spec in list(mesh.specs.values()):
                for size, axes in zip(spec.shape, spec.layout.dims, strict=True):
                    if size % math.prod(mesh.shape[a] for a in axes):
                        found.add((size, axes))
            for ranks, splits in uneven if mesh.coordinate is not None else ():
                axes = _axes_of(mesh, ranks)
                if axes and not all(_follows(split, mesh, ranks, found) for split in splits):
                    out.numbered.setdefault(grid, set()).add(axes)
        return out


def _follows(
    split: Sequence[int], mesh: ProcessMesh, ranks: Sequence[int], pieces: set[tuple[int, Axes]]
) -> bool:
    """Returns True if the amounts that this rank exchanges with each other one of ``ranks`` are
    equal, or proportional to the sizes of their pieces of a dim: they follow from its own sizes."""
    own = world()[0]
    others = [(n, rank) for n, rank in zip(split, ranks, strict=True) if n or rank != own]
    amounts = [n for n, _ in others]
    if len({*amounts}) == 1:
        return True
    places = [mesh.coordinate_of(rank) or () for _, rank in others]
    for size, axes in pieces:
        sizes = [box_at((size,), (axes,), mesh.shape, place).shape[0] for place in places]
        total, whole = sum(amounts), sum(sizes)
        if total and [n * whole for n in amounts] == [n * total for n in sizes]:
            return True
    return False


def _volumes(plan: CrossMeshPlan) -> frozenset[tuple[int, Volume]]:
    out: dict[int, tuple[list[int], list[int]]] = {}
    for (sender, receiver), box in plan.routing.messages.items():
        for rank, direction in ((sender, 0), (receiver, 1)):
            out.setdefault(rank, ([], []))[direction].append(box.numel)
    return frozenset((r, (tuple(sorted(s)), tuple(sorted(g)))) for r, (s, g) in out.items())


def _axes_of(mesh: ProcessMesh, ranks: tuple[int, ...]) -> Axes:
    """Returns the axes on which these ranks of the mesh differ, or () if the ranks are not all
    ranks along these axes."""
    if not set(ranks) <= set(mesh.ranks):
        return ()
    places = [mesh.coordinate_of(rank) or () for rank in ranks]
    axes = tuple(a for a in range(mesh.ndim) if len({place[a] for place in places}) > 1)
    return axes if math.prod(mesh.shape[a] for a in axes) == len(ranks) else ()
