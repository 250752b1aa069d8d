"""Files that are synced to the disk when they are closed, and their checksums."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

from disttensor.progress import Advance, show_nothing

Sums = dict[str, tuple[int, int]]  # name of a file -> (bytes, CRC-32)


class SummedFile(io.RawIOBase):
    """A new file. ``close`` adds its size and checksum to ``sums``, under its name. ``advance`` is
    called with the bytes of each write."""

    def __init__(self, file: Any, path: str, sums: Sums, advance: Advance = show_nothing) -> None:
        self.file, self.path, self.sums, self.advance = file, path, sums, advance
        self.size = self.crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):  # a disk that is nearly full takes a part
                done += self.file.write(view[done:]) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None
        self.crc = zlib.crc32(view, self.crc)
        self.size += done
        self.advance(done)
        return done

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return int(self.file.fileno())

    def finish(self) -> None:
        """Makes the content last."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        if not self.file.closed:
            try:
                self.finish()
            finally:
                self.file.close()
            self.sums[os.path.basename(self.path)] = (self.size, self.crc)
        super().close()


class SyncedFile(SummedFile):
    """A file of a file system. Its content is on the disk when ``close`` returns."""

    def __init__(
        self, path: str | os.PathLike[str], sums: Sums, advance: Advance = show_nothing
    ) -> None:
        file = open(path, "wb", buffering=0)  # noqa: SIM115
        super().__init__(file, os.fspath(path), sums, advance)


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
