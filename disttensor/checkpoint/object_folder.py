"""Checkpoints in an object store, through fsspec: ``s3://bucket/run``, ``gs://bucket/run``.

An object store has no folders that could be renamed. A checkpoint is complete when it has
complete.json, which is put there last, in one operation. Each file is first written to a temporary
file of this machine, then sent whole. An operation that fails is repeated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from disttensor.checkpoint.folder import FORMAT, MARK, NAME, LocalFolder, Saved
from disttensor.checkpoint.synced_file import SummedFile, Sums, path_inside
from disttensor.progress import Advance, show_nothing

T = TypeVar("T")
WAITS = 0.5, 2.0, 8.0  # seconds before an operation is repeated
_ANSWERS = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError


def repeat(what: str, call: Callable[[], T]) -> T:
    """Returns ``call()``, which is repeated if it fails. Raises OSError after the last attempt."""
    for wait in (*WAITS, None):
        try:
            return call()
        except _ANSWERS:
            raise
        except Exception as error:
            if wait is None:
                attempts = len(WAITS) + 1
                text = f"{error}, in {attempts} attempts"
                raise OSError(errno.EIO, text, what) from error
            time.sleep(wait)
    raise AssertionError


class _ObjectFile(SummedFile):
    """A new object, sent when it is closed. An error in the block of ``with`` sends nothing."""

    def __init__(self, fs: Any, path: Path, sums: Sums, advance: Advance) -> None:
        self._fs, self._failed = fs, False
        file = tempfile.NamedTemporaryFile(buffering=0)  # noqa: SIM115
        super().__init__(file, str(path), sums, advance)

    def finish(self) -> None:
        if not self._failed:
            repeat(self.path, lambda: self._fs.put_file(self.file.name, self.path))

    def __exit__(self, *error: Any) -> None:
        self._failed = error[0] is not None
        super().__exit__(*error)


class _Object:
    """An object to read parts of."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs, self._path, self.size = fs, path, size

    def read(self, start: int, count: int) -> memoryview:
        stop = min(start + count, self.size)
        call = self._fs.cat_file
        return memoryview(bytearray(repeat(self._path, lambda: call(self._path, start, stop))))

    def release(self) -> None:
        """Does nothing: a part that was read is dropped with its last reference."""


class ObjectFolder(LocalFolder):
    """Checkpoints under a URL of fsspec."""

    is_remote = True

    def __init__(self, url: str) -> None:
        fsspec: Any = import_module("fsspec.core")
        self._fs, root = fsspec.url_to_fs(url)
        self.key = url
        super().__init__(PurePosixPath(root))  # type: ignore[arg-type]

    def complete(self) -> list[Saved]:
        return [saved for saved in self._all() if self._has_mark(saved.path)]

    def _all(self) -> list[Saved]:
        """Returns all checkpoints, complete or not, the newest last."""
        self._fs.invalidate_cache()
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = repeat(str(self.path), lambda: self._fs.ls(str(self.path), detail=False))
        ends = [name.rstrip("/").rpartition("/")[2] for name in names]
        found = [(match, name) for name in ends if (match := NAME.fullmatch(name))]
        return sorted(Saved(int(m[1]), int(m[2]), self.path / name) for m, name in found)

    def _has_mark(self, path: Path) -> bool:
        mark = str(path / MARK)
        with contextlib.suppress(FileNotFoundError):  # ``exists`` is False after any error
            return bool(repeat(mark, lambda: self._fs.info(mark)))
        return False

    def begin(self, step: int) -> Path:
        """Returns a new path to write to, and removes incomplete checkpoints of earlier runs."""
        for saved in self._all():
            if not self._has_mark(saved.path):
                self._remove(saved.path)
        number = max((saved.number for saved in self._all()), default=0) + 1
        path = self.path / f"{number:06d}-step-{step}"
        repeat(str(path), lambda: self._fs.makedirs(str(path), exist_ok=True))
        return path

    def create(
        self, path: Path, name: str, sums: Sums, advance: Advance = show_nothing
    ) -> SummedFile:
        return _ObjectFile(self._fs, path / name, sums, advance)

    def publish(self, path: Path, step: int, sums: Sums) -> None:
        self.check_sizes(path, sums)
        data = json.dumps({"format": FORMAT, "step": step, "files": sums}).encode()
        part, mark = str(path / f".{MARK}"), str(path / MARK)
        repeat(part, lambda: self._fs.pipe_file(part, data))
        repeat(mark, lambda: self._fs.mv(part, mark))  # also atomic in a file system

    def sizes(self, path: Path) -> dict[str, int]:
        self._fs.invalidate_cache()
        entries = repeat(str(path), lambda: self._fs.ls(str(path), detail=True))
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest ``keep`` checkpoints, of each complete.json first."""
        for saved in self.complete()[: -keep if keep else 0]:
            self._remove(saved.path / MARK)
            self._remove(saved.path)

    def discard(self, path: Path) -> None:
        if not self._has_mark(path):  # another rank may have ended after the last file was there
            self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            repeat(str(path), lambda: self._fs.rm(str(path), recursive=True))
        except FileNotFoundError:
            pass
        except OSError as error:
            warnings.warn(f"Checkpointer: {path} cannot be removed: {error}", stacklevel=2)

    @contextmanager
    def open(self, path: Path, name: str) -> Iterator[_Object]:  # type: ignore[override]
        at = str(path_inside(path, name))
        yield _Object(self._fs, at, int(repeat(at, lambda: self._fs.info(at)["size"])))
