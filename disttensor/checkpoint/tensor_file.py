"""Files of tensors: each piece as ``torch.save`` writes it, so that torch.distributed.checkpoint
can read it, then an index of the pieces and its length. Reading runs no code from a file.

A rank writes one file. A rank that loads opens only the files that have its pieces, and reads only
their indexes and these pieces.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disttensor.checkpoint.folder import check_sum, open_checked
from disttensor.checkpoint.saved_layout import SavedLayout
from disttensor.checkpoint.synced_file import Sums
from disttensor.comm.wire import dense
from disttensor.core.layout import Box
from disttensor.progress import bar
from disttensor.tensor.checkpointable import prepare_to_read
from disttensor.tensor.dist_tensor import DistTensor, local_of
from disttensor.torch_private import ArchiveReader

_LENGTH = struct.Struct("<Q")  # of the index, at the end of a file
_ALIGNED = 64  # bytes: of a piece, and in it, by ``torch.save``, of its elements
SUFFIX = ".distcp"


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"__{rank}_0{SUFFIX}"


def rank_of(name: str) -> int | None:
    """Returns the rank that writes a file of tensors; None for another file."""
    found = re.fullmatch(r"__(\d+)_0\.distcp", name)
    return int(found[1]) if found else None


class PieceEntry(NamedTuple):
    """A piece in the index of a file: its bytes in the file, their CRC-32, and the piece."""

    start: int
    length: int
    crc: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def write_pieces(file: Any, pieces: Mapping[str, Box], tensors: Mapping[str, Any]) -> None:
    """Writes pieces to a SyncedFile, whose sum will be the sum of the index."""
    index = {}
    for name, box in pieces.items():
        file.write(bytes(-file.tell() % _ALIGNED))
        start, file.crc = file.tell(), 0
        torch.save(_dense(local_of(tensors[name])), file)
        index[name] = PieceEntry(start, file.tell() - start, file.crc, *box)
    file.crc, data = 0, json.dumps(index).encode()
    file.write(data + _LENGTH.pack(len(data)))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Returns x on the CPU, with memory of its own size: ``torch.save`` writes all of it."""
    x = dense(x.cpu())
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def read_index(file: Any, crc: int, path: Path) -> dict[str, PieceEntry]:
    """Returns the index of a file. Raises ValueError if it was changed."""
    (length,) = _LENGTH.unpack(file.read(file.size - _LENGTH.size, _LENGTH.size))
    data = file.read(max(file.size - _LENGTH.size - length, 0), file.size)
    check_sum(data, crc, path)
    return {name: PieceEntry(*entry) for name, entry in json.loads(bytes(data[:length])).items()}


class PieceRead(NamedTuple):
    """A part to read: ``part`` of the saved ``piece`` of ``layout`` goes to ``target``. ``check``:
    whether this rank compares the checksum of the piece, for all ranks that read the part."""

    name: str
    layout: SavedLayout
    piece: Box
    part: Box
    target: torch.Tensor
    check: bool


class Reader:
    """Reads tensors of a checkpoint, each rank its own pieces. ``check`` comes first, and ``fill``
    changes the tensors."""

    def __init__(
        self, folder: Any, path: Path, files: Sums, layouts: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self.folder, self.path, self.files = folder, path, files
        self.reads: dict[str, list[PieceRead]] = {}  # by file
        for name, x in tensors.items():
            if name not in layouts or tuple(layouts[name][0]) != tuple(x.shape):
                raise ValueError(f"{path} has no tensor {name} of shape {list(x.shape)}")
            for rank, read in _reads(name, SavedLayout(*layouts[name]), x):
                self.reads.setdefault(file_of(rank), []).append(read)
        self._entries: dict[str, list[PieceEntry]] = {}
        self._kept: dict[tuple[str, int], memoryview] = {}  # pieces of an object store

    def check(self) -> None:
        """Finds the pieces in their files. Raises ValueError for a file that is missing, or a piece
        that was changed."""
        total = sum(
            r.piece.numel * r.layout.dtype.itemsize
            for reads in self.reads.values() for r in reads if r.check
        )  # fmt: skip
        with bar("checking", total, "B") as advance:
            for name, reads in self.reads.items():
                with open_checked(self.folder, self.path, name, self.files) as file:
                    path, found = self.path / name, []
                    index = read_index(file, self.files[name][1], path)
                    for r in reads:
                        entry = index.get(r.name)
                        if entry is None or (tuple(entry.offset), tuple(entry.shape)) != r.piece:
                            raise ValueError(f"{path} has no piece {r.piece} of {r.name}")
                        found.append(entry)
                        if r.check:
                            data = file.read(entry.start, entry.length)
                            check_sum(data, entry.crc, path, f", at {r.name}")
                            if self.folder.is_remote:
                                self._kept[name, entry.start] = data
                            del data
                            file.release()
                            advance(r.piece.numel * r.layout.dtype.itemsize)
                    self._entries[name] = found

    def fill(self) -> None:
        """Copies the pieces directly from the files to their place."""
        with bar("loading", sum(map(len, self.reads.values())), "pieces") as advance:
            for name, reads in self.reads.items():
                with open_checked(self.folder, self.path, name, self.files) as file:
                    for r, entry in zip(reads, self._entries[name], strict=True):
                        data = self._kept.pop((name, entry.start), None)
                        data = data or file.read(entry.start, entry.length)
                        saved = _saved(data, r, self.path / name)
                        r.target.copy_(r.part.cut(saved, r.piece))
                        file.release()
                        advance()


def _reads(name: str, layout: SavedLayout, x: torch.Tensor) -> Iterator[tuple[int, PieceRead]]:
    """Yields what this rank reads to fill x, each with the rank that wrote it. The ranks that hold
    a copy of a DistTensor divide the checks among themselves."""
    if isinstance(x, DistTensor):
        mesh, box = x.spec.mesh, prepare_to_read(x)
        if box is None:
            return
        assert mesh.coordinate is not None
        own = SavedLayout(layout.shape, layout.dtype, (mesh.ranks, mesh.shape), x.spec.layout.dims)
        copy, copies = own.place(mesh.coordinate)[0], own.copies()
    else:
        box, copy, copies = Box((0,) * x.ndim, tuple(x.shape)), 0, 1
    local = local_of(x)
    for i, (rank, piece) in enumerate(layout.pieces(box)):
        part = piece.intersect(box)
        assert part is not None
        yield rank, PieceRead(name, layout, piece, part, part.cut(local, box), i % copies == copy)


def _saved(data: memoryview, read: PieceRead, path: Path) -> torch.Tensor:
    """Returns the tensor as a view of ``data``, in which ``torch.save`` has written its bytes
    uncompressed, as a record of an archive."""
    dtype, (_, shape) = read.layout.dtype, read.piece
    record = ArchiveReader(_Slice(data))
    if (size := record.get_record_size("data/0")) != read.piece.numel * dtype.itemsize:
        raise ValueError(f"{path}: {read.name} has {size} bytes in the file")
    start = record.get_record_offset("data/0")
    return torch.frombuffer(data, dtype=dtype, count=read.piece.numel, offset=start).view(shape)


class _Slice(io.RawIOBase):
    """A file with the bytes of ``data``, which are not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
