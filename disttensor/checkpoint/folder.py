"""A folder of checkpoints: lists complete checkpoints, publishes new ones atomically, removes old
ones.

    000007-step-350/          complete: renamed to this after all its files were on the disk
        complete.json         the step, and size and CRC-32 of each file
        values.pt             values that are no tensors
        .metadata, *.distcp   tensors, as torch.distributed.checkpoint writes them
    .writing-000008-step-400/ incomplete; after a crash the next save removes it

Folders are numbered in the order in which they were published.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from disttensor.checkpoint.synced_file import Sums, SyncedFile, path_inside, sum_of, sync_folder
from disttensor.progress import bar

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"
_MARK = "complete.json"


class Saved(NamedTuple):
    """A complete checkpoint."""

    number: int
    step: int
    path: Path


def complete(folder: Path) -> list[Saved]:
    """Returns the complete checkpoints in ``folder``, the newest last."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(Saved(int(m[1]), int(m[2]), folder / name) for m, name in found)


def begin(folder: Path, step: int) -> Path:
    """Creates a new folder to write into, and removes incomplete folders of earlier runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        if name.startswith((_WRITING, _REMOVING)):
            _remove(folder / name)
    number = max((saved.number for saved in complete(folder)), default=0) + 1
    while os.path.lexists(path := folder / f"{_WRITING}{number:06d}-step-{step}"):
        number += 1  # a folder that could not be removed
    path.mkdir()
    return path


def publish(path: Path, step: int, sums: Sums) -> Path:
    """Gives a folder its final name. All its files are on the disk."""
    for name, (size, _) in sums.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise OSError(
                f"{path / name} is not what another rank has written: all ranks need the same "
                "folder, on a file system that they share"
            )
    mark = {"format": 1, "step": step, "files": sums}
    with SyncedFile(path / _MARK, {}) as file:
        file.write(json.dumps(mark, indent=1).encode())
    sync_folder(path)
    target = path.with_name(path.name.removeprefix(_WRITING))
    os.rename(path, target)
    sync_folder(target.parent)
    return target


def prune(folder: Path, keep: int | None) -> None:
    """Removes all but the newest ``keep`` checkpoints: each is renamed first."""
    for saved in complete(folder)[: -keep if keep else 0]:
        doomed = saved.path.with_name(_REMOVING + saved.path.name)
        try:
            os.rename(saved.path, doomed)
        except OSError as error:
            _warn(saved.path, error)
        else:
            _remove(doomed)


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


def check(path: Path, part: int, parts: int) -> int:
    """Returns the step of a checkpoint. Raises ValueError if a file is missing or modified; of
    large files this rank reads the content of every ``parts``-th one."""
    try:
        mark: Any = json.loads((path / _MARK).read_bytes())
        step, files, version = int(mark["step"]), mark["files"], mark["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / _MARK} cannot be read: {error}. {_WAY_OUT}") from None
    if version != 1:
        raise ValueError(f"{path} has format {version}: it is from a newer disttensor")
    large = sorted(name for name in files if name.endswith(".distcp"))
    mine = {name for name in files if name not in large or large.index(name) % parts == part}
    for name, (size, _) in files.items():
        file = path_inside(path, name)
        if not file.is_file():
            raise ValueError(f"{file} is missing. {_WAY_OUT}")
        there = file.stat().st_size
        if there != size:
            raise ValueError(f"{file} has {there:,} bytes, and was saved with {size:,}. {_WAY_OUT}")
    with bar("checking", sum(files[name][0] for name in mine), "B") as advance:
        for name, (size, crc) in files.items():
            if name in mine and sum_of(path / name, advance) != (size, crc):
                raise ValueError(f"{path / name} was changed since it was saved. {_WAY_OUT}")
    return step


_WAY_OUT = "Load an earlier checkpoint by its step, or remove the folder"
