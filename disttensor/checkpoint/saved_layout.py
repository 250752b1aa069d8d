"""Chooses which rank writes and reads which piece of a tensor, from the layouts alone.

All ranks of a tensor's mesh choose the same writer of each piece. The choice is saved with the
layout. A rank that loads computes from it the pieces that it needs, and their files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from disttensor.comm.process_group import world
from disttensor.core.layout import Axes, Box, Range, box_at, chunk
from disttensor.tensor.dist_tensor import DistTensor

Mesh = tuple[tuple[int, ...], tuple[int, ...]]  # ranks, and sizes of axes


class SavedLayout(NamedTuple):
    """Where the pieces of a saved tensor are. ``mesh``: the ranks that held the tensor.
    ``replica``: the number of the copy, of those along the axes that split no dim, that is
    written. Saved as a tuple."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Mesh
    dims: tuple[Axes, ...]
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, dims {self.dims} of mesh {self.mesh[1]}"

    def split_axes(self) -> tuple[int, ...]:
        return tuple(axis for axes in self.dims for axis in axes)

    def copy_axes(self) -> tuple[int, ...]:
        split = self.split_axes()
        return tuple(axis for axis in range(len(self.mesh[1])) if axis not in split)

    def copies(self) -> int:
        """Returns how many ranks hold each piece."""
        return math.prod(self.mesh[1][axis] for axis in self.copy_axes())

    def piece_count(self) -> int:
        """Returns the number of pieces, with the empty ones."""
        return math.prod(self.mesh[1][axis] for axis in self.split_axes())

    def place(self, coordinate: tuple[int, ...]) -> tuple[int, Box]:
        """Returns the number of the copy at a coordinate of the mesh, and its piece."""
        number = 0
        for axis in self.copy_axes():
            number = number * self.mesh[1][axis] + coordinate[axis]
        return number, box_at(self.shape, self.dims, self.mesh[1], coordinate)

    def pieces(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yields the pieces that have elements of ``box``, each with the rank that wrote it."""
        ranks, sizes = self.mesh
        copies = self.copy_axes()
        found: list[list[tuple[int, int, int]]] = []
        for size, axes, start, length in zip(self.shape, self.dims, *box, strict=True):
            cuts = _cuts(size, tuple([sizes[axis] for axis in axes]))
            at = max(bisect_right(cuts, start, key=itemgetter(0)) - 1, 0)
            mine = []
            while at < len(cuts) and cuts[at][0] < start + length:
                if cuts[at][1]:
                    mine.append((at, *cuts[at]))
                at += 1
            found.append(mine)
        for parts in product(*found):
            place = [0] * len(sizes)
            numbers = [(axes, part[0]) for axes, part in zip(self.dims, parts, strict=True)]
            for axes, i in (*numbers, (copies, self.replica)):
                for axis in reversed(axes):
                    i, place[axis] = divmod(i, sizes[axis])
            rank = 0
            for size, i in zip(sizes, place, strict=True):
                rank = rank * size + i
            yield ranks[rank], Box(tuple(p[1] for p in parts), tuple(p[2] for p in parts))


@lru_cache(maxsize=4096)
def _cuts(size: int, parts: tuple[int, ...]) -> list[Range]:
    """Returns (offset, length) of all pieces of a dim that axes of these sizes split."""
    cuts = [(0, size)]
    for n in parts:
        cuts = [
            (at + o, m) for at, whole in cuts for o, m in (chunk(whole, n, i) for i in range(n))
        ]
    return cuts


@lru_cache(maxsize=4096)
def _sizes(shape: tuple[int, ...], dims: tuple[Axes, ...], mesh: tuple[int, ...]) -> Any:
    """Returns the elements of the piece at each coordinate; size 1 along axes that split no dim."""
    out = np.ones((1,) * len(mesh), np.int64)
    for size, axes in zip(shape, dims, strict=True):
        lengths = np.array([n for _, n in _cuts(size, tuple([mesh[axis] for axis in axes]))])
        lengths = lengths.reshape([mesh[axis] for axis in axes]).transpose(np.argsort(axes))
        out = out * lengths.reshape([n if axis in axes else 1 for axis, n in enumerate(mesh)])
    return out


class WritePlan(NamedTuple):
    """``layouts``: of all tensors that this rank holds. ``pieces``: the pieces that it writes.
    ``loads``: for each mesh of these tensors, the bytes that each rank writes."""

    layouts: dict[str, SavedLayout]
    pieces: dict[str, Box]
    loads: list[tuple[Mesh, Any]]

    def nbytes(self) -> int:
        """Returns the bytes that this rank writes."""
        return sum(box.numel * self.layouts[n].dtype.itemsize for n, box in self.pieces.items())

    def nbytes_of_ranks(self) -> dict[int, int]:
        """Returns the bytes that ranks write, of the ranks that hold the same tensors."""
        total: Counter[int] = Counter()
        for (ranks, _), load in self.loads:
            total.update(dict(zip(ranks, load.flatten().tolist(), strict=True)))
        same = set(total).intersection(*(ranks for (ranks, _), _ in self.loads))
        return {rank: total[rank] for rank in sorted(same)}


def plan_writes(
    tensors: Mapping[str, torch.Tensor], holders: Mapping[str, tuple[int, ...]]
) -> WritePlan:
    """Returns the plan of a save on this rank. Each piece is written by one of the ranks that hold
    it; their bytes are balanced over the tensors of each mesh.

    Args:
        tensors: by name; regular tensors are the same on all their ranks.
        holders: the ranks of regular tensors, if these are not all ranks of the world.
    """
    rank, size = world()
    everyone = tuple(range(size))
    plan = WritePlan({}, {}, [])
    meshes: dict[Any, Any] = {}  # ProcessMesh or ranks -> mesh, place of this rank, loads
    for name in sorted(tensors):
        x = tensors[name]
        key: Any = x.spec.mesh.root if isinstance(x, DistTensor) else holders.get(name) or everyone
        if key not in meshes:
            mesh = (key, (len(key),)) if isinstance(key, tuple) else (key.ranks, key.shape)
            at = mesh[0].index(rank) if rank in mesh[0] else None
            place = None if at is None else tuple(map(int, np.unravel_index(at, mesh[1])))
            meshes[key] = mesh, place, np.zeros(mesh[1], np.int64)
            if place is not None:
                plan.loads.append((mesh, meshes[key][2]))
        mesh, place, load = meshes[key]
        if place is None:
            continue
        dims: tuple[Axes, ...] = ((),) * x.ndim
        if isinstance(x, DistTensor):
            of_root = x.spec.mesh.root_axes
            dims = tuple(tuple(of_root[axis] for axis in axes) for axes in x.spec.layout.dims)
        layout = SavedLayout(tuple(x.shape), x.dtype, mesh, dims)
        by_copy = load.max(axis=layout.split_axes())
        layout = layout._replace(replica=int(by_copy.argmin()))
        writers: list[Any] = [slice(None)] * len(mesh[1])
        chosen = np.unravel_index(layout.replica, by_copy.shape) if by_copy.ndim else ()
        for axis, i in zip(layout.copy_axes(), chosen, strict=True):
            writers[axis] = slice(int(i), int(i) + 1)
        load[tuple(writers)] += _sizes(layout.shape, dims, mesh[1]) * x.dtype.itemsize
        plan.layouts[name] = layout
        copy, box = layout.place(place)
        if copy == layout.replica and box.numel:
            plan.pieces[name] = box
    return plan
