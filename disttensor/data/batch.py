"""Batches of a loader on their meshes: the placement of each entry, the metadata that all ranks
need, and the DistTensors made from this rank's samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from disttensor.checks import check_sequence
from disttensor.comm import objects
from disttensor.comm.groups import world_group
from disttensor.core.layout import Box, box_at, layout_of
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Partial, Placement, Replicate, Shard, as_placement
from disttensor.core.spec import spec_of
from disttensor.meta import execute
from disttensor.pytree import Path
from disttensor.tensor.dist_tensor import wrap

Tensor = torch.Tensor
Places = tuple[ProcessMesh, Sequence[Placement]]


# reduction -> of no samples, in a dtype
_EMPTY: dict[str, Callable[[torch.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "max": lambda dtype: -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min,
    "min": lambda dtype: math.inf if dtype.is_floating_point else torch.iinfo(dtype).max,
}


def entries(mesh: Any, placements: Any) -> dict[Any, Places]:
    """Returns entry of a batch -> its placement; None -> the placement of all entries."""
    one_mesh = isinstance(mesh, (ProcessMesh, DeviceMesh))
    listed = {None: mesh} if one_mesh else _by_key("mesh", mesh)
    meshes: Any = {key: as_mesh("shard_loader: mesh", m) for key, m in listed.items()}
    flat = [as_placement(p) for p in _by_key("placements", placements).values()]
    one_layout = all(isinstance(p, Placement) for p in flat)
    mesh = meshes[None] if one_mesh else mesh
    if one_mesh and one_layout:
        return {None: (mesh, _check(placements, mesh, alone=True))}
    meshes = None if one_mesh else meshes
    layouts = None if one_layout else _by_key("placements", placements)
    keys = meshes if meshes is not None else layouts or {}
    if meshes is not None and layouts is not None and meshes.keys() != layouts.keys():
        raise ValueError(
            f"shard_loader: meshes for the entries {list(meshes)}, placements for {list(layouts)}: "
            "give one of each for each entry of a batch"
        )
    places = {
        key: (on, _check(placements if layouts is None else layouts[key], on, layouts is None))
        for key, on in (meshes or dict.fromkeys(keys, mesh)).items()
    }
    split = {(m, tuple(not isinstance(p, Replicate) for p in of)) for m, of in places.values()}
    if len(split) > 1 and any(map(is_summand, places.values())):
        raise ValueError(
            "shard_loader: an entry with dt.Partial is made of the samples that a rank loads, so "
            "all entries are split over the same mesh axes, and here they are not: "
            + ", ".join(f"{key!r}: {list(of)} on {m!r}" for key, (m, of) in places.items())
        )
    return places


def is_summand(place: Places | None) -> bool:
    """Returns True if the value that each rank computes from its samples is pending."""
    return place is not None and any(isinstance(p, Partial) for p in place[1])


def _by_key(name: str, value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    expected = "one for all tensors of a batch, or a dict or tuple with one for each entry,"
    return dict(enumerate(check_sequence(f"shard_loader: {name}", value, expected)))


def _check(placements: Any, mesh: ProcessMesh, alone: bool) -> Sequence[Placement]:
    """Returns placements after checking them. ``alone``: they apply to all entries."""
    given = check_sequence("shard_loader: placements", placements, "a list of placements")
    placements = [as_placement(p) for p in given]
    for p in placements:
        pending = isinstance(p, Partial) and p.reduce_op in _EMPTY and not alone
        if type(p) not in (Shard, Replicate) and not pending:
            raise ValueError(
                f"shard_loader: placements: {p!r}: a batch that is loaded is split (dt.Shard) or "
                "replicated; a number that a collate_fn makes of a rank's samples gets "
                "dt.Partial('sum'), 'max' or 'min', in placements of its own"
            )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"shard_loader: placements {list(placements)}: one for each axis of {mesh!r} is "
            "expected"
        )
    if any(isinstance(p, Partial) for p in placements) and any(
        type(p) is Shard for p in placements
    ):
        raise ValueError(
            f"shard_loader: {list(placements)}: an entry is split, or a part of a reduction"
        )
    return tuple(placements)


def rows_of(count: int, mesh: ProcessMesh, placements: Sequence[Placement]) -> tuple[int, int]:
    """Returns the first sample of this rank's piece, and the sample after its last."""
    own = [Shard(0) if isinstance(p, Partial) else p for p in placements]
    own = [p if isinstance(p, Shard) and p.dim == 0 else Replicate() for p in own]
    dims = layout_of(own, 1, mesh.ndim).dims
    box = box_at((count,), dims, mesh.shape, mesh.coordinate or ())
    return box.offset[0], box.offset[0] + box.shape[0]


@dataclass(frozen=True)
class _Leaf:
    """A tensor of a batch, without dim 0 unless it is a ``summand``."""

    tail: tuple[int, ...]
    dtype: torch.dtype
    summand: bool = False

    def __repr__(self) -> str:
        first = [] if self.summand else ["n"]
        return f"{self.dtype}[{', '.join([*first, *map(str, self.tail)])}]"


def _place(places: dict[Any, Places], path: Path) -> Places | None:
    return places.get(None) or places.get(path[0] if path else None)


def _name(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


@dataclass(frozen=True)
class BatchFormat:
    """Collects the tensors of a batch with ``rows`` rows, and keeps metadata for all ranks."""

    places: dict[Any, Places]
    tensors: dict[Path, Tensor]
    rows: int

    def __call__(self, x: Any, path: Path) -> Any:
        if not isinstance(x, Tensor):
            if x is None or isinstance(x, (bool, int, float, str, bytes)):
                return x
            raise TypeError(
                f"shard_loader: {_name(path)} is a {type(x).__name__}: let collate_fn make a "
                "tensor of it, or leave it out"
            )
        self.tensors[path] = x
        if is_summand(_place(self.places, path)):
            return _Leaf(tuple(x.shape), x.dtype, summand=True)
        if not x.ndim or x.shape[0] != self.rows:
            raise ValueError(
                f"shard_loader: {_name(path)} has shape {list(x.shape)} for {self.rows} samples: "
                "dim 0 of each tensor counts the samples. A value of all samples of a rank, such "
                "as a count of tokens, needs placements that say how the values of ranks are "
                "combined: {'tokens': [dt.Partial('sum'), dt.Replicate()], ...}"
            )
        return _Leaf(tuple(x.shape[1:]), x.dtype)


@dataclass(frozen=True)
class Placed:
    """Makes the DistTensors of a batch with this number of samples, of which this rank has
    ``rows``."""

    places: dict[Any, Places]
    tensors: dict[Path, Tensor]
    samples: int
    rows: Box

    def __call__(self, x: Any, path: Path) -> Any:
        if type(x) is not _Leaf:
            return x
        found = _place(self.places, path)
        if found is None:
            raise ValueError(
                f"shard_loader: {_name(path)} has no mesh and placements: they were given for "
                f"{', '.join(_name((key,)) for key in self.places)}"
            )
        mesh, placements = found
        shape = x.tail if x.summand else (self.samples, *x.tail)
        try:
            spec = spec_of(mesh, shape, x.dtype, placements)
        except ValueError as error:
            raise ValueError(
                f"shard_loader: {_name(path)} of shape {list(shape)}: {error}"
            ) from None
        if mesh.coordinate is None:
            return execute.off_mesh_leaf(spec)
        if x.summand:
            local = self.tensors.get(path)
            if local is None:  # this rank has no sample
                local = torch.full(shape, _EMPTY[spec.layout.partial[0][1]](x.dtype), dtype=x.dtype)
            return wrap(local.to(mesh.device), spec)
        box = spec.local_box
        if (box.offset[0], box.offset[0] + box.shape[0]) != rows_of(self.samples, mesh, placements):
            raise ValueError(
                f"shard_loader: {_name(path)} of shape {list(shape)}: {list(placements)} names "
                "dim 0 from its end: say Shard(0)"
            )
        if not box.numel:
            return wrap(torch.empty(box.shape, dtype=x.dtype, device=mesh.device), spec)
        whole = Box((*self.rows.offset, *(0,) * len(x.tail)), (*self.rows.shape, *x.tail))
        local = self.tensors[path]
        moved = box.cut(local, whole).to(mesh.device, non_blocking=local.is_pinned())
        return wrap(moved.contiguous(), spec)


def exchange(number: int, load: Callable[[], tuple[tuple[int, int], Any]]) -> Any:
    """Exchanges the facts of a batch between all ranks, and returns its format. ``load`` returns
    (samples and digest of the indices, format), and its error is raised on all ranks, as is an
    error if facts differ."""
    group = world_group()
    everyone = objects.gather_results(f"shard_loader: batch {number}", group, load)
    for rank, (theirs, _) in zip(group.ranks, everyone, strict=True):
        if theirs != everyone[0][0]:
            raise ValueError(
                f"shard_loader: batch {number} of rank {rank} has other samples than on rank 0. "
                "The loader of every rank iterates over all data in one order: use no "
                "DistributedSampler, and shuffle with a generator that belongs to the loader, "
                "DataLoader(..., generator=torch.Generator().manual_seed(0)), or with the same "
                "seed on all ranks"
            )
    known = [(r, f) for r, (_, f) in zip(group.ranks, everyone, strict=True) if f is not None]
    for rank, theirs in known:
        if theirs != known[0][1]:
            raise ValueError(
                f"shard_loader: batch {number} is {known[0][1]} on rank {known[0][0]} and {theirs} "
                f"on rank {rank}: but for dim 0 the pieces of a batch have one shape, and values "
                "that are no tensors are the same on all ranks. A collate_fn that pads must pad to "
                "a length that does not depend on its samples"
            )
    return known[0][1] if known else None
