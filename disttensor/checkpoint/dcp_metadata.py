"""Writes the metadata by which torch.distributed.checkpoint reads a checkpoint.

    python -m disttensor.checkpoint.dcp_metadata FOLDER/000007-step-350

A save writes it too, unless the checkpoint has more than ``MOST`` pieces: this metadata lists each
piece, and each process that uses it reads all of it. disttensor does not read it.
"""

from __future__ import annotations

import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from disttensor.checkpoint.folder import LocalFolder, open_checked, read_mark
from disttensor.checkpoint.saved_layout import SavedLayout
from disttensor.checkpoint.synced_file import Sums
from disttensor.checkpoint.tensor_file import SUFFIX, read_index
from disttensor.checkpoint.values_file import read_values
from disttensor.core.layout import Box

FILE = ".metadata"
MOST = 100_000  # pieces; about a second


def metadata_of(folder: Any, path: Path, files: Sums, most: int | None = None) -> bytes | None:
    """Returns the metadata of a checkpoint, from the indexes of its files; None if it would list
    more than ``most`` pieces."""
    kinds: Any = import_module("torch.distributed.checkpoint.metadata")
    storage_info: Any = import_module("disttensor.torch_private").storage_info()
    layouts = {n: SavedLayout(*of) for n, of in read_values(folder, path, files).layouts.items()}
    whole = {name: Box((0,) * len(of.shape), of.shape) for name, of in layouts.items()}
    if most is not None and sum(of.piece_count() for of in layouts.values()) > most:
        return None
    entries = {
        name: kinds.TensorStorageMetadata(
            kinds.TensorProperties(of.dtype),
            torch.Size(of.shape),
            [kinds.ChunkStorageMetadata(*map(torch.Size, box)) for _, box in of.pieces(whole[name])]
            or [kinds.ChunkStorageMetadata(*map(torch.Size, whole[name]))],
        )
        for name, of in layouts.items()
    }
    stored = {}
    for name in (name for name in files if name.endswith(SUFFIX)):
        with open_checked(folder, path, name, files) as file:
            for key, entry in read_index(file, files[name][1], path / name).items():
                index = kinds.MetadataIndex(key, torch.Size(entry.offset))
                stored[index] = storage_info(name, entry.start, entry.length)
    return pickle.dumps(kinds.Metadata(entries, None, stored, kinds.StorageMeta()))


def main(target: Path) -> None:
    folder = LocalFolder(target.parent)
    data = metadata_of(folder, target, read_mark(folder, target)[1])
    assert data is not None
    (target / FILE).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
