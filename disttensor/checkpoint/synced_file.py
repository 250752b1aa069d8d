"""Files that are synced to the disk when they are closed, and their checksums."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

from disttensor.progress import Advance, show_nothing

Sums = dict[str, tuple[int, int]]  # name of a file -> (bytes, CRC-32)
_CHUNK = 1 << 20


class SyncedFile(io.RawIOBase):
    """A new file. Its content is on the disk when ``close`` returns, which adds its sum to
    ``sums``. ``advance`` is called with the bytes of each write."""

    def __init__(
        self, path: str | os.PathLike[str], sums: Sums, advance: Advance = show_nothing
    ) -> None:
        self.path, self.sums, self.advance = Path(path), sums, advance
        self.size = self.crc = 0
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):  # a disk that is nearly full takes a part
                done += self.file.write(view[done:]) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.crc = zlib.crc32(view, self.crc)
        self.size += done
        self.advance(done)
        return done

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        if not self.file.closed:
            try:
                os.fsync(self.file.fileno())
            finally:
                self.file.close()
            self.sums[self.path.name] = (self.size, self.crc)
        super().close()


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def path_inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that another file of ``folder`` names. Raises ValueError for a
    name that is not the name of a file in the folder, such as ``../x`` or ``/etc/x``."""
    if not name or Path(name).name != name:
        raise ValueError(f"{folder} names the file {name!r}, which is outside of this folder")
    return folder / name


def sum_of(path: Path, advance: Advance = show_nothing) -> tuple[int, int]:
    """Returns (bytes, CRC-32) of a file."""
    crc = size = 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
            advance(count)
    return size, crc
