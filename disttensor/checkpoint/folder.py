"""A folder of checkpoints: lists complete checkpoints, publishes new ones atomically, removes old
ones.

    000007-step-350/          complete: renamed to this after all its files were on the disk
        complete.json         the step, and size and checksum of each file
        values.pt             values that are no tensors, and the layouts of tensors
        values-4.pt           those that rank 4 saved, the first rank of a mesh
        __0_0.distcp          tensors that rank 0 saved (tensor_file.py)
        .metadata             for torch.distributed.checkpoint
    .writing-000008-step-400/ incomplete; after a crash the next save removes it

Folders are numbered in the order in which they were published.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from disttensor.checkpoint.synced_file import SummedFile, Sums, SyncedFile, path_inside, sync_folder
from disttensor.progress import Advance, show_nothing

NAME = re.compile(r"(\d{6,})-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"
MARK = "complete.json"
FORMAT = 2


class Saved(NamedTuple):
    """A complete checkpoint."""

    number: int
    step: int
    path: Path


class MappedFile:
    """A file to read parts of. Parts are views of the file until ``release``."""

    def __init__(self, file: Any) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._memory: Any = b""
        if self.size:
            self._memory = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)

    def read(self, start: int, count: int) -> memoryview:
        return memoryview(self._memory)[start : start + count]

    def release(self) -> None:
        """Drops the parts that were read from the memory of this process."""
        if self.size and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)


class LocalFolder:
    """Checkpoints in a folder of a file system, which all ranks share."""

    is_remote = False  # True: reading is slow, so that a part is read once
    key = ""  # of an object store: its URL

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def complete(self) -> list[Saved]:
        """Returns the complete checkpoints, the newest last."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        found = [(match, name) for name in names if (match := NAME.fullmatch(name))]
        return sorted(Saved(int(m[1]), int(m[2]), self.path / name) for m, name in found)

    def begin(self, step: int) -> Path:
        """Creates a new folder to write into, and removes incomplete folders of earlier runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in os.listdir(self.path):
            if name.startswith((_WRITING, _REMOVING)):
                _remove(self.path / name)
        number = max((saved.number for saved in self.complete()), default=0) + 1
        while os.path.lexists(path := self.path / f"{_WRITING}{number:06d}-step-{step}"):
            number += 1  # a folder that could not be removed
        path.mkdir()
        return path

    def create(
        self, path: Path, name: str, sums: Sums, advance: Advance = show_nothing
    ) -> SummedFile:
        """Returns a new file of a checkpoint, which adds its sum to ``sums`` when it is closed."""
        return SyncedFile(path / name, sums, advance)

    def publish(self, path: Path, step: int, sums: Sums) -> None:
        """Completes a checkpoint, all files of which are on the disk."""
        self.check_sizes(path, sums)
        with self.create(path, MARK, {}) as file:
            file.write(json.dumps({"format": FORMAT, "step": step, "files": sums}).encode())
        sync_folder(path)
        os.rename(path, path.with_name(path.name.removeprefix(_WRITING)))
        sync_folder(path.parent)

    def check_sizes(self, path: Path, sums: Sums) -> None:
        """Raises OSError if this rank does not see the files that all ranks have written."""
        sizes = self.sizes(path)
        for name, (size, _) in sums.items():
            if sizes.get(name) != size:
                raise OSError(
                    f"{path / name} is not what another rank has written: all ranks need the same "
                    "folder, on a file system that they share"
                )

    def sizes(self, path: Path) -> dict[str, int]:
        """Returns the bytes of each file of a checkpoint."""
        with os.scandir(path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest ``keep`` checkpoints: each is renamed first."""
        for saved in self.complete()[: -keep if keep else 0]:
            doomed = saved.path.with_name(_REMOVING + saved.path.name)
            try:
                os.rename(saved.path, doomed)
            except OSError as error:
                _warn(saved.path, error)
            else:
                _remove(doomed)

    def discard(self, path: Path) -> None:
        """Removes an incomplete checkpoint."""
        shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def open(self, path: Path, name: str) -> Iterator[MappedFile]:
        """Opens a file to read. Raises ValueError for a file outside of the folder."""
        with open(path_inside(path, name), "rb") as file:
            yield MappedFile(file)


def read_mark(folder: Any, path: Path) -> tuple[int, Sums]:
    """Returns the step of a checkpoint, and the sizes and checksums of its files."""
    try:
        with folder.open(path, MARK) as file:
            mark: Any = json.loads(bytes(file.read(0, file.size)))
        step, version = int(mark["step"]), mark["format"]
        files = {name: (int(size), int(crc)) for name, (size, crc) in mark["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / MARK} cannot be read: {error}. {_WAY_OUT}") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}: it is from another version of disttensor")
    return step, files


@contextmanager
def open_checked(folder: Any, path: Path, name: str, files: Sums) -> Iterator[Any]:
    """Opens a file to read. Raises ValueError if it is missing or has another size."""
    if name not in files:
        raise ValueError(f"{path / MARK} does not list {name}, which the checkpoint needs")
    try:
        with folder.open(path, name) as file:
            if file.size != files[name][0]:
                raise ValueError(
                    f"{path / name} has {file.size:,} bytes, and was saved with "
                    f"{files[name][0]:,}. {_WAY_OUT}"
                )
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path / name} is missing. {_WAY_OUT}") from None


def check_sum(data: Any, crc: int, file: Path, what: str = "") -> None:
    """Raises ValueError if bytes of a file are not those that were saved."""
    if zlib.crc32(data) != crc:
        raise ValueError(f"{file} was changed since it was saved{what}. {_WAY_OUT}")


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one. Checkpoints do not depend on leftover folders: a folder
    that cannot be removed (open files on NFS) is a warning, and the next save tries again."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        _warn(path, error)


def _warn(path: Path, error: OSError) -> None:
    warnings.warn(f"Checkpointer: {path} cannot be removed: {error}", stacklevel=2)


_WAY_OUT = "Load an earlier checkpoint by its step, or remove the folder"
