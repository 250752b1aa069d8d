"""Compares the files that all ranks are about to read: folders that nodes do not share differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

from disttensor.comm.agree import agree
from disttensor.comm.groups import world_group

_PART = 1 << 16  # bytes of a part of a file
_PARTS = 16  # parts of each file that are read


def check_same_files(who: str, path: str | Path) -> None:
    """Raises MismatchError on all ranks if the file or the folder ``path`` differs between the
    ranks: names, sizes, or the parts of the contents that are read. All ranks make the call."""
    agree(
        f"{who}: {path}, which all ranks share,",
        world_group(),
        files=_described(Path(path).expanduser()),
    )


def _described(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    digest, count, total = hashlib.blake2b(digest_size=6), 0, 0
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        count, total = count + 1, total + size
        digest.update(f"{file.relative_to(path.parent)} {size}\n".encode())
        with file.open("rb") as data:
            for part in range(_PARTS):
                data.seek(part * max(size - _PART, 0) // (_PARTS - 1))
                digest.update(data.read(_PART))
                if size <= _PART:
                    break
    return f"{count} of {total} bytes, digest {digest.hexdigest()}," if count else "none"
