"""Files that someone else has written: they run no code, change no class, and name no file outside
of their folder. A save follows no link, and a save that is interrupted leaves one model."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import disttensor as dt
from disttensor.checkpoint import tensor_file
from disttensor.comm.safe_pickle import METADATA, SafeUnpickler


def sets(name: str) -> bytes:
    """Returns a pickle that names a class and sets an attribute of the class."""
    module, key = MetadataIndex.__module__.encode(), name.encode()
    state = b"N}X" + len(key).to_bytes(4, "little") + key + b"ctorch\nSize\ns\x86"
    return b"\x80\x02c" + module + b"\nMetadataIndex\n" + state + b"b."


@pytest.mark.parametrize("name", ["__eq__", "__hash__", "nonsense"])
def test_a_pickle_that_sets_an_attribute_of_a_class_is_refused(name: str, tmp_path: Path) -> None:
    pickle.dumps(MetadataIndex(""))  # Python keeps the names of slots in the class
    before = dict(vars(MetadataIndex))
    path = tmp_path / "metadata"
    path.write_bytes(sets(name))
    with path.open("rb") as file, pytest.raises(pickle.UnpicklingError, match="changes the class"):
        SafeUnpickler(file, METADATA).load()
    assert dict(vars(MetadataIndex)) == before


def test_names_of_files_do_not_leave_their_folder(tmp_path: Path) -> None:
    checkpoints = dt.Checkpointer(tmp_path / "run")
    checkpoints.save(1, x=torch.ones(99))
    (folder,) = (tmp_path / "run").iterdir()
    whole = folder / "complete.json"
    mark = json.loads(whole.read_text())
    data = next(name for name in mark["files"] if name.endswith(".distcp"))
    outside = tmp_path / "outside.distcp"
    (folder / data).rename(outside)
    for name in (str(outside), "../../outside.distcp"):
        files = {**mark["files"], name: mark["files"][data]}
        whole.write_text(json.dumps({**mark, "files": files}))
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(ValueError, match="outside of this folder"),
        ):
            patch.setattr(tensor_file, "file_of", lambda rank: name)
            checkpoints.load(x=torch.ones(99))
    model = nn.Linear(2, 2)
    index = {"weight_map": {"weight": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside of this folder"):
        dt.pretrained.load(model, tmp_path)


def test_a_save_follows_no_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    folder = tmp_path / "model"
    folder.mkdir()
    names = [".model.safetensors.part", ".model.safetensors.index.json.part"]
    names += [f".model-{i:05}-of-00002.safetensors.part" for i in (1, 2)]
    for size in ("5GB", 20):
        for name in names:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)
        dt.pretrained.save(nn.Linear(2, 2), folder, max_shard_size=size)
        assert target.read_text() == "kept"


class Died(BaseException):
    pass


def dies(nth: int, body: Callable[[], Any]) -> bool:
    """Runs ``body``, which ends before its nth change of a folder; False: it has fewer."""
    count = 0

    def change(call: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > nth:
            raise Died
        return call(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "fsync"):
            patch.setattr(os, name, partial(change, getattr(os, name)))
        with contextlib.suppress(Died):
            body()
            return False
    return True


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        nn.init.constant_(p, value)
    return model


def loaded(folder: Path) -> set[float]:
    model = dt.pretrained.load(model_of(0.0), folder)
    return {x for p in model.parameters() for x in p.flatten().tolist()}


@pytest.mark.parametrize("sizes", [("5GB", "5GB"), ("5GB", 20), (20, "5GB"), (20, 20), (20, 40)])
def test_a_save_that_dies_leaves_the_earlier_model_or_the_new_one(
    sizes: tuple[Any, Any], tmp_path: Path
) -> None:
    results = []
    for nth in range(100):
        folder = tmp_path / str(nth)
        dt.pretrained.save(model_of(1.0), folder, max_shard_size=sizes[0])
        save = partial(dt.pretrained.save, model_of(2.0), folder, max_shard_size=sizes[1])
        died = dies(nth, save)
        results.append(loaded(folder))
        dt.pretrained.save(model_of(3.0), folder, max_shard_size=sizes[1])
        assert loaded(folder) == {3.0}
        files = [file.name for file in folder.iterdir()]
        assert not [name for name in files if name.startswith(".")]
        assert (len(files) == 1) is (sizes[1] == "5GB")
        if not died:
            break
    assert {1.0} in results and results[-1] == {2.0}
    assert all(found in ({1.0}, {2.0}) for found in results)
