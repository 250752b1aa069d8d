"""Plans, writes and reads the files of torch.distributed.checkpoint. Files are written with a
checksum and synced to the disk; reading runs no code from a file. This module is imported when
first used, because torch takes long to import."""

from __future__ import annotations

import io
import mmap
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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
)

from disttensor.checkpoint.synced_file import Sums, SyncedFile, path_inside
from disttensor.comm.safe_pickle import METADATA, SafeUnpickler
from disttensor.progress import Advance, bar
from disttensor.torch_private import ArchiveReader


class _SyncedFiles(FileSystem):
    def __init__(self, advance: Advance) -> None:
        self.sums: Sums = {}
        self.advance = advance

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with SyncedFile(path, self.sums, self.advance) as file:
            yield file


class Writer(FileSystemWriter):
    """``sums``: of all files that this rank has written. ``advance``: see SyncedFile."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(path, sync_files=False)  # SyncedFile does it
        self.fs = files = _SyncedFiles(advance)
        self.sums = files.sums

    def write(self, plan: SavePlan, planner: DefaultSavePlanner, rank: int) -> Any:
        """Writes the items of a plan, and returns facts about each item for ``finish``."""
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
        """Copies the tensors. ``memory``: buffers of the previous save, which are used again."""
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
        data: Any = super().resolve_data(write_item) if found is None else found
        return data.resolve_conj().resolve_neg().contiguous()  # the reader reads bytes


class Reader(FileSystemReader):
    """Reads a checkpoint: unpickles only names, and copies tensors directly from the file to their
    place."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            known: metadata.Metadata = SafeUnpickler(file, METADATA).load()
        self.pieces: dict[Any, tuple[torch.dtype, torch.Size]] = {
            (name, chunk.offsets): (entry.properties.dtype, chunk.sizes)
            for name, entry in known.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
            for chunk in entry.chunks
        }
        return known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            file_name = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(file_name, []).append(item)
        with bar("loading", len(plan.items), "pieces") as advance:
            for name, items in by_file.items():
                with open(path_inside(Path(self.path), name), "rb", buffering=1 << 16) as file:
                    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                    for item in items:
                        part = zip(item.storage_offsets, item.lengths, strict=True)
                        saved = self._saved(item, file, memory)
                        saved = saved[tuple(slice(o, o + n) for o, n in part)]
                        planner.resolve_tensor(item).detach().copy_(saved)
                        if hasattr(mmap, "MADV_DONTNEED"):  # the pages of one item at a time
                            memory.madvise(mmap.MADV_DONTNEED)
                        advance()

    def _saved(self, item: ReadItem, file: Any, memory: mmap.mmap) -> torch.Tensor:
        """Returns the tensor as a view of the file, in which ``torch.save`` has written its bytes
        uncompressed, as a record of an archive."""
        index, info = item.storage_index, self.storage_data[item.storage_index]
        dtype, shape = self.pieces[index.fqn, index.offset]
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        archive = ArchiveReader(self._slice_file(file, info))
        if (size := archive.get_record_size("data/0")) != shape.numel() * dtype.itemsize:
            raise ValueError(f"{self.path}: {index.fqn} has {size} bytes in the file")
        start = info.offset + archive.get_record_offset("data/0")
        return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start).view(shape)


def reading(path: Path, tensors: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Returns a function that fills ``tensors``: each rank reads its pieces. Raises an error for
    tensors that the checkpoint does not have."""
    reader = Reader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    known = reader.read_metadata()
    planner.set_up_planner(dict(tensors), known)
    reader.set_up_storage_reader(known, False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    return lambda: reader.read_data(plan, planner)
