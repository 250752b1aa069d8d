"""Batches of a loader: the metadata and values that ranks compare, and the DistTensors made from
this rank's samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from disttensor.comm import collectives, objects
from disttensor.comm.groups import world_group
from disttensor.core.placement import neutral_element
from disttensor.core.spec import spec_of
from disttensor.data.entries import (
    Places,
    is_first_replica,
    is_summand,
    replica_axes,
    rows_of,
    sample_axes,
)
from disttensor.data.order import BatchRows
from disttensor.off_mesh import execute
from disttensor.pytree import Path
from disttensor.tensor.dist_tensor import wrap

Tensor = torch.Tensor
PURPOSE = "loader"  # of communicators that the program does not use: a thread may load in advance


@dataclass(frozen=True)
class _Leaf:
    """A tensor of a batch, without dim 0 unless it is a ``summand``."""

    tail: tuple[int, ...]
    dtype: torch.dtype
    summand: bool = False

    def __repr__(self) -> str:
        first = [] if self.summand else ["n"]
        return f"{self.dtype}[{', '.join([*first, *map(str, self.tail)])}]"


@dataclass(frozen=True)
class _NotANumber:
    """A NaN of a batch, which equals the NaN of another rank."""

    def __repr__(self) -> str:
        return "nan"


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
        if isinstance(x, float) and x != x:
            return _NotANumber()
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
    """Makes the DistTensors of the batch ``rows`` from the ``tensors`` that this rank has loaded.
    ``load_once``: see ``shard_loader``."""

    places: dict[Any, Places]
    tensors: dict[Path, Tensor]
    rows: BatchRows
    load_once: bool

    def __call__(self, x: Any, path: Path) -> Any:
        if type(x) is _NotANumber:
            return float("nan")
        if type(x) is not _Leaf:
            return x
        found = _place(self.places, path)
        if found is None:
            raise ValueError(
                f"shard_loader: {_name(path)} has no mesh and placements: they were given for "
                f"{', '.join(_name((key,)) for key in self.places)}"
            )
        mesh, placements = found
        samples = self.rows.samples
        shape = x.tail if x.summand else (samples, *x.tail)
        try:
            spec = spec_of(mesh, shape, x.dtype, placements)
        except ValueError as error:
            raise ValueError(
                f"shard_loader: {_name(path)} of shape {list(shape)}: {error}"
            ) from None
        if not x.summand and sorted(spec.layout.dims[0]) != list(sample_axes(placements)):
            raise ValueError(
                f"shard_loader: {_name(path)} of shape {list(shape)}: {list(placements)} names "
                "dim 0 from its end: say Shard(0)"
            )
        if mesh.coordinate is None:
            return execute.off_mesh_leaf(spec)
        first, stop = rows_of(samples, mesh, placements)
        if first == stop:  # this rank has no sample
            empty = neutral_element(spec.layout.partial[0][1], x.dtype) if x.summand else 0
            local = torch.full(spec.local_shape, empty, dtype=x.dtype, device=mesh.device)
            return wrap(local, spec)
        local = self._loaded(x, path, found, first, stop)
        if x.summand:
            return wrap(local.to(mesh.device), spec)
        local = local[(slice(None), *spec.local_box.slices[1:])]
        moved = local.to(mesh.device, non_blocking=local.is_pinned())
        return wrap(moved.contiguous(), spec)

    def _loaded(self, x: _Leaf, path: Path, found: Places, first: int, stop: int) -> Tensor:
        """Returns the samples ``first`` to ``stop``, or the value that was computed from them."""
        mesh, axes = found[0], replica_axes(*found)
        if not self.load_once or is_first_replica(*found):
            local = _cut(self.tensors[path], x.summand, self.rows, first, stop)
        else:
            shape = x.tail if x.summand else (stop - first, *x.tail)
            local = torch.empty(shape, dtype=x.dtype, device=mesh.device)
        if not self.load_once or not axes:
            return local
        return collectives.broadcast(local.to(mesh.device), 0, mesh.group(axes, PURPOSE))


def _cut(x: Tensor, summand: bool, rows: BatchRows, first: int, stop: int) -> Tensor:
    return x if summand else x[first - rows.first : stop - rows.first]


Digests = dict[tuple[Path, int, int], int]  # of the values of some samples, from first to stop


def replica_digests(
    places: dict[Any, Places], tensors: dict[Path, Tensor], rows: BatchRows
) -> Digests:
    """Returns digests of the values that other ranks load too."""
    found: Digests = {}
    for path, x in tensors.items():
        place = _place(places, path)
        if place is not None and place[0].coordinate is not None and replica_axes(*place):
            first, stop = rows_of(rows.samples, *place)
            if first < stop:
                local = _cut(x, is_summand(place), rows, first, stop)
                found[path, first, stop] = fast_digest(local)
    return found


_BLOCK = 256  # words of 8 bytes


def fast_digest(x: Tensor) -> int:
    """Returns a digest of the bytes of a tensor, as fast as memory is read: each block of words is
    multiplied by fixed odd numbers and added up, and the sums go into a CRC-32."""
    words = objects.bytes_of(x)
    words = words.clone() if words.storage_offset() % 8 else words
    whole = len(words) // (8 * _BLOCK) * (8 * _BLOCK)
    if not whole:
        return _crc(words)
    factors = torch.arange(1, 2 * _BLOCK, 2, device="cpu") * 0x9E3779B97F4A7C1
    sums = words[:whole].view(torch.int64).view(-1, _BLOCK).mv(factors)
    return _crc(words[whole:], _crc(sums.view(torch.uint8)))


def _crc(data: Tensor, start: int = 0) -> int:
    array: Any = data.numpy()
    return zlib.crc32(array, start)


def exchange(number: int, load: Callable[[], tuple[tuple[int, str], Any, Digests]]) -> Any:
    """Exchanges the facts of a batch between all ranks, and returns its format. ``load`` returns
    (samples and digest of the indices, format, digests of replicas), and its error is raised on all
    ranks, as is an error if facts differ."""
    group = world_group(PURPOSE)
    everyone = objects.gather_results(f"shard_loader: batch {number}", group, load, any_class=True)
    seen: dict[Any, tuple[int, int]] = {}
    for rank, (theirs, *_) in zip(group.ranks, everyone, strict=True):
        if theirs != everyone[0][0]:
            raise ValueError(
                f"shard_loader: batch {number} of rank {rank} has other samples than on rank 0. "
                "The loader of every rank iterates over all data in one order: use no "
                "DistributedSampler, and shuffle with a generator that belongs to the loader, "
                "DataLoader(..., generator=torch.Generator().manual_seed(0)), or with the same "
                "seed on all ranks"
            )
    known = [(r, f) for r, (_, f, _) in zip(group.ranks, everyone, strict=True) if f is not None]
    for rank, theirs in known:
        if theirs != known[0][1]:
            raise ValueError(
                f"shard_loader: batch {number} is {known[0][1]} on rank {known[0][0]} and {theirs} "
                f"on rank {rank}: but for dim 0 the pieces of a batch have one shape, and values "
                "that are no tensors are the same on all ranks. A collate_fn that pads must pad to "
                "a length that does not depend on its samples"
            )
    for rank, (_, _, digests) in zip(group.ranks, everyone, strict=True):
        for (path, first, stop), digest in digests.items():
            other, expected = seen.setdefault((path, first, stop), (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"shard_loader: batch {number}: {_name(path)} of the samples {first} to "
                    f"{stop - 1} has other values on rank {rank} than on rank {other}, and both "
                    "ranks hold these samples. The dataset or collate_fn draws random numbers that "
                    "differ between processes: seed Python's and NumPy's generators alike on all "
                    "ranks, draw from a generator that is seeded by the index of the sample, or "
                    "pass load_once=True, by which one of these ranks loads the samples and sends "
                    "them to the others"
                )
    return known[0][1] if known else None
