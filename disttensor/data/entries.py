"""The placements of the entries of a batch, and the samples that each rank loads for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from disttensor.checks import check_sequence
from disttensor.comm.process_group import world
from disttensor.core.layout import box_at, layout_of
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Partial, Placement, Replicate, Shard, as_placement

Places = tuple[ProcessMesh, Sequence[Placement]]


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
    split = {(m, sample_axes(of)) for m, of in places.values()}
    if len(split) > 1 and any(map(is_summand, places.values())):
        raise ValueError(
            "shard_loader: an entry with dt.Partial is made of the samples that a rank loads, so "
            "all entries are split over the same mesh axes (dim 0, or dt.Partial), and here they "
            "are not: "
            + ", ".join(f"{key!r}: {list(of)} on {m!r}" for key, (m, of) in places.items())
            + ". On an axis that does not split the samples give dt.Replicate(): two ranks that "
            "load the same samples would count them twice"
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
        pending = isinstance(p, Partial) and p.reduce_op in ("sum", "max", "min") and not alone
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


def sample_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the mesh axes over which ranks load different samples."""
    return tuple(a for a, p in enumerate(placements) if isinstance(p, Partial) or p == Shard(0))


def replica_axes(mesh: ProcessMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the mesh axes over which ranks load the same samples."""
    split = sample_axes(placements)
    return tuple(a for a in range(mesh.ndim) if a not in split and mesh.shape[a] > 1)


def is_first_replica(mesh: ProcessMesh, placements: Sequence[Placement]) -> bool:
    """Returns True for the first of the ranks that load the same samples."""
    at = mesh.coordinate
    return at is not None and not any(at[a] for a in replica_axes(mesh, placements))


def rows_of(count: int, mesh: ProcessMesh, placements: Sequence[Placement]) -> tuple[int, int]:
    """Returns the first sample of this rank's piece, and the sample after its last."""
    split = sample_axes(placements)
    own = [Shard(0) if a in split else Replicate() for a in range(mesh.ndim)]
    dims = layout_of(own, 1, mesh.ndim).dims
    box = box_at((count,), dims, mesh.shape, mesh.coordinate or ())
    return box.offset[0], box.offset[0] + box.shape[0]


def first_part(places: Sequence[Places]) -> int:
    """Returns where the piece of this rank begins, in parts of 2**20 of a batch: the same for ranks
    that load the same samples, also of two meshes."""
    return min((rows_of(2**20, *place)[0] for place in places), default=0)


def loads_everything(mesh: ProcessMesh, placements: Sequence[Placement]) -> bool:
    """Returns True if every rank of the world loads all samples of a batch."""
    split = any(mesh.shape[axis] > 1 for axis in sample_axes(placements))
    return not split and len(mesh.ranks) == world()[1]
