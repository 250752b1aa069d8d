"""The file of the tensors that a process has recorded: for each a header, and its bytes."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import torch

from disttensor.comm.objects import bytes_of
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import index_of_dtensor

Key = tuple[int, str, str, int]  # step, phase, name, and the number of this call in the step


class Place(NamedTuple):
    """Where a piece lies in a tensor of ``shape``. numbers: of its elements along each dim. op,
    group: it is a part of a reduction over the ranks with an equal ``group``."""

    shape: tuple[int, ...]
    numbers: list[list[int]]
    op: str
    group: Any


class Entry(NamedTuple):
    """The header of a tensor. order: of the entries of a process. dtype: None for a gradient that
    is missing. place: None for a regular tensor. size: in bytes."""

    key: Key
    order: int
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    place: Place | None = None
    size: int = 0


def write(file: BinaryIO, key: Key, order: int, x: Any) -> None:
    """Writes a tensor, or None for a missing gradient. Skips a tensor without values on this rank,
    one whose layout has no place (Balanced), and integers that are computed."""
    local = place = None
    if isinstance(x, DistTensor) and not x.spec.layout.custom and x.is_initialized:
        mesh, at = x.spec.mesh, x.spec.mesh.coordinate or ()
        index = [[*range(o, o + n)] for o, n in zip(*x.spec.box_at(at), strict=True)]
        place, local = _place(x, index, dict(x.spec.layout.partial), at, mesh.ranks), x.local
    elif type(x).__name__ == "DTensor" and (at := x.device_mesh.get_coordinate()):
        ops = {axis: _op(p) for axis, p in enumerate(x.placements) if p.is_partial()}
        place = _place(x, index_of_dtensor(x), ops, at, x.device_mesh.mesh.tolist())
        local = x.to_local().clone()  # waits for a collective
    elif not isinstance(x, DistTensor):
        local = x
    if x is None:
        pickle.dump(Entry(key, order), file)
    elif (
        local is not None
        and not local.is_meta
        and (local.is_floating_point() or local.is_complex() or key[1] in ("input", "update"))
    ):
        local = (local.to_dense() if local.is_sparse else local).detach()
        data = bytes_of(local).numpy().tobytes()
        entry = Entry(key, order, local.dtype, tuple(local.shape), place, len(data))
        pickle.dump(entry, file)
        file.write(data)


def _place(x: Any, index: Any, ops: dict[int, str], coordinate: Any, ranks: Any) -> Place:
    apart = tuple(None if axis in ops else c for axis, c in enumerate(coordinate))
    return Place(tuple(x.shape), index, next(iter(ops.values()), ""), (apart, ranks))


def _op(placement: Any) -> str:
    power = getattr(placement, "norm_type", None)  # of torch's norms of sharded gradients
    return str(placement.reduce_op) if power is None else f"norm {power}"


class Records:
    """The entries of a process, by key, in an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.entries: dict[Key, Entry] = {}
        self.starts: dict[Key, int] = {}
        with suppress(EOFError):
            while True:
                entry: Entry = pickle.load(self.file)
                self.entries[entry.key], self.starts[entry.key] = entry, self.file.tell()
                self.file.seek(entry.size, 1)

    def read(self, key: Key) -> torch.Tensor | None:
        """Returns a tensor, in float64 if it is of floats; None if it is missing."""
        entry = self.entries.get(key)
        if entry is None or entry.dtype is None:
            return None
        self.file.seek(self.starts[key])
        out = torch.empty(entry.sizes, dtype=entry.dtype)
        if entry.size:
            data = bytearray(self.file.read(entry.size))
            out = torch.frombuffer(data, dtype=entry.dtype).view(entry.sizes)
        return out.double() if out.is_floating_point() else out
