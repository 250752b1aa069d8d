"""torch.distributed.checkpoint as the checkpointer uses it: its plans and its files, written with a
sum and synced, and read without running what a file says. Imported when first used: torch takes
long to load it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    metadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from disttensor.checkpoint.synced_file import Sums, SyncedFile


class _SyncedFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with SyncedFile(path, self.sums) as file:
            yield file


class Writer(FileSystemWriter):
    """``sums``: of all files that this rank has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # SyncedFile does it
        self.fs = _SyncedFiles()

    @property
    def sums(self) -> Sums:
        return self.fs.sums

    def write(self, plan: SavePlan, planner: DefaultSavePlanner, rank: int) -> Any:
        """What ``finish`` is to know of each item."""
        self.set_up_storage_writer(rank == 0, rank=rank)
        plan = self.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        return self.write_data(plan, planner).value()

    def finish(self, metadata: metadata.Metadata, results: Any) -> None:
        super().finish(metadata, results)
        self.sums[".metadata"] = self.sums.pop(".metadata.tmp")

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta(save_id=self.save_id)  # no path: a folder may be moved


class Staged(DefaultSavePlanner):
    """Plans the writing of a flat state dict; ``stage`` copies what this rank writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies: dict[Any, torch.Tensor] = {}

    def stage(self, plan: SavePlan, memory: dict[Any, torch.Tensor]) -> None:
        """``memory``: of the save before this one, which is used again."""
        for item in plan.items:
            data: Any = super().resolve_data(item).detach()
            old = memory.get(item.index)
            if old is None or (old.shape, old.dtype) != (data.shape, data.dtype):
                old = torch.empty(data.shape, dtype=data.dtype)
            self.copies[item.index] = old.copy_(data, non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = self.copies.get(write_item.index)
        return super().resolve_data(write_item) if found is None else found


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "Metadata",
        "MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}  # fmt: skip


class _Names(pickle.Unpickler):
    """Unpickles the classes of a checkpoint's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")


class Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            return _Names(file).load()


def reading(path: Path, tensors: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Call it to fill ``tensors``: each rank reads what it holds. Raises for tensors that the
    checkpoint does not have."""
    reader = Reader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    known = reader.read_metadata()
    planner.set_up_planner(dict(tensors), known)
    reader.set_up_storage_reader(known, False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    return lambda: reader.read_data(plan, planner).wait()
