"""Who reads the memory behind a DistTensor gets the whole value or an error; who compares it goes
on."""

from __future__ import annotations

import ctypes
import io
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.layouts import counted
from tests.support.pool import on_ranks

ERRORS = RuntimeError, TypeError, ValueError, AttributeError, BufferError, ctypes.ArgumentError


def pair() -> ProcessMesh:
    return ProcessMesh([0, 1], ("tp",))


def split(outside: bool = False) -> Any:
    mesh = ProcessMesh([1], ("one",)) if outside else pair()
    return dt.shard_tensor(counted(5, 2, dtype=torch.float32), mesh, [Shard(0)])


class Tied(nn.Module):
    def __init__(self, placement: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(counted(5, 3))
        self.b.weight = self.a.weight
        dt.shard_module(self, pair(), {"a.weight": [placement]})


def writers(folder: Path) -> dict[str, Any]:
    save, tied = safetensors.torch, Tied(Shard(0))
    return {
        "save_file": lambda: save.save_file({"x": split()}, folder / "a.safetensors"),
        "outside": lambda: save.save_file({"x": split(True)}, folder / "b.safetensors"),
        "save": lambda: (folder / "c.safetensors").write_bytes(save.save({"x": split()})),
        "save_model": lambda: save.save_model(tied, folder / "d.safetensors"),
        "hub": lambda: huggingface_hub.save_torch_state_dict(tied.state_dict(), folder),
        "ctypes": lambda: ctypes.cast(split().data_ptr(), ctypes.POINTER(ctypes.c_float))[0],
        "number": lambda: int(split().data_ptr()),
        "storage": lambda: split().untyped_storage()[0],
        "typed": lambda: split().storage().tolist(),
        "bytes": lambda: bytes(split().untyped_storage()),
        "set": lambda: torch.empty(0).set_(split().untyped_storage()),
        "dlpack": lambda: torch.utils.dlpack.to_dlpack(split()),
        "frombuffer": lambda: torch.frombuffer(split(), dtype=torch.float32),
    }


@on_ranks(2)
def test_who_reads_a_piece_as_the_whole_is_refused(tmp_path):
    for name, write in writers(tmp_path).items():
        if name == "outside" and torch.distributed.get_rank() == 1:
            continue
        with pytest.raises(ERRORS) as error:
            write()
        short = {
            "dlpack": "Cannot access data pointer",
            "set": "PieceStorage",
            "frombuffer": "buffer protocol",
        }
        assert short.get(name, "dt.pretrained.save") in str(error.value), (name, error.value)
    assert not list(tmp_path.glob("*.safetensors*"))


@on_ranks(2)
def test_who_takes_the_value_gets_the_whole(tmp_path):
    x, want = split(), counted(5, 2, dtype=torch.float32)
    for got in (np.asarray(x), np.from_dlpack(x), torch.from_dlpack(x), torch.zeros(5, 2).copy_(x)):
        assert torch.equal(torch.as_tensor(got), want)
    with pytest.raises(TypeError, match="data of a regular tensor"):
        torch.zeros(5, 2).data = x
    np.save(file := io.BytesIO(), x)
    file.seek(0)
    assert np.array_equal(np.load(file), want.numpy())
    model = Tied(Replicate())  # whole on each rank: its memory is what a plain tensor's is
    file = tmp_path / f"{torch.distributed.get_rank()}.safetensors"
    safetensors.torch.save_model(model, file)
    assert torch.equal(safetensors.torch.load_file(file)["a.weight"], counted(5, 3).float())


@on_ranks(2)
def test_comparing_memory_goes_on(tmp_path):
    model = Tied(Shard(0))
    a, b = model.state_dict().values()
    other = split()
    assert a.data_ptr() == b.data_ptr() != other.data_ptr() and a.data_ptr() != 0
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
    assert a.untyped_storage().nbytes() == 60 and a.data_ptr() % 4 == 0
    assert len({x.data_ptr() for x in (a, b, other)}) == 2
    tensors = {"a": a, "b": b, "other": other}
    [shared] = [s for s in safetensors.torch._find_shared_tensors(tensors) if len(s) > 1]
    assert shared == {"a", "b"}
    empty = [dt.zeros(1, 2, mesh=pair(), placements=[Shard(0)]) for _ in range(2)]
    assert empty[0].data_ptr() != empty[1].data_ptr()
    file = tmp_path / f"{torch.distributed.get_rank()}.safetensors"
    safetensors.torch.save_file({"a.weight": counted(5, 3).float() + 1}, file)
    safetensors.torch.load_model(model, file)
    assert torch.equal(model.b.weight.full_tensor(), counted(5, 3).float() + 1)
