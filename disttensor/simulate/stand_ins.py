"""Functions that replace others in a simulated rank, whose tensors have no data and whose other
ranks do not run: saving, reading all data of a tensor, exchanging objects, starting the world.

They stay in place until the process of the rank ends.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from disttensor.checkpoint.checkpointer import Checkpointer
from disttensor.checkpoint.saved_layout import plan_writes
from disttensor.checkpoint.state import collect, parameter_names
from disttensor.checkpoint.tensor_file import file_of
from disttensor.errors import SimulationError, user_line
from disttensor.simulate.scratch_files import ScratchFiles
from disttensor.torch_private import FakeTensor, start_fake_world, storage_id

_MARK = b"tensors without data:"
_WAY_OUT = (
    'Leave this out if os.environ.get("DISTTENSOR_SIMULATION") is set, as it is in a simulated rank'
)
_OBJECTS = (  # functions of torch.distributed
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
)  # fmt: skip


def replace_functions(files: ScratchFiles, rank: int, world: int) -> None:
    """Replaces the functions in this process, also where modules have imported them."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    replaced: list[tuple[tuple[Any, ...], str, Any]] = [
        ((torch, torch.serialization), "save", functools.partial(_save, torch.save, files)),
        ((torch, torch.serialization), "load", functools.partial(_load, torch.load)),
        ((dist, c10d), "init_process_group",
         functools.partial(_init, dist.init_process_group, rank, world)),
        *(((dist, c10d), name, _refuse_objects(name)) for name in _OBJECTS),
    ]  # fmt: skip
    for owners, name, call in replaced:
        for owner in owners:
            setattr(owner, name, call)
    torch.Tensor.numpy = _refuse_array(torch.Tensor.numpy)  # type: ignore[method-assign]
    Checkpointer.save = functools.partialmethod(_save_state, files)  # type: ignore


# Files --------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles tensors without data as their shapes. ``sizes``: bytes of their storages."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.sizes: dict[int, int] = {}

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return None
        storage = x.untyped_storage()
        self.sizes[storage_id(storage)] = storage.nbytes()
        is_parameter = isinstance(x, torch.nn.Parameter)
        return tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, is_parameter


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, made: Any) -> Any:
        shape, stride, dtype, device, requires_grad, is_parameter = made
        x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return torch.nn.Parameter(x, requires_grad) if is_parameter else (
            x.requires_grad_(requires_grad)
        )  # fmt: skip


def _save(usual: Callable[..., Any], files: ScratchFiles, obj: Any, f: Any, *args: Any,
          **kwargs: Any) -> None:  # fmt: skip
    """Saves what has data as usual. Of other tensors the shapes are saved, and the bytes noted."""
    if isinstance(f, str | bytes | os.PathLike):
        with open(f, "wb") as file:
            _save(usual, files, obj, file, *args, **kwargs)
        return
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(obj)
    if not pickler.sizes:
        usual(obj, f, *args, **kwargs)
        return
    f.write(_MARK + data.getvalue())
    if isinstance(getattr(f, "name", None), str):
        nbytes = sum(pickler.sizes.values()) + len(data.getvalue())
        files.saved[files.absolute(f.name)] = nbytes


def _load(usual: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
    is_path = isinstance(f, str | bytes | os.PathLike)
    with open(f, "rb") if is_path else contextlib.nullcontext(f) as file:
        at = file.tell()
        if file.read(len(_MARK)) == _MARK:
            return _Unpickler(file).load()
        file.seek(at)
    return usual(f, *args, **kwargs)


def _save_state(
    self: Checkpointer, files: ScratchFiles, step: int, *, background: bool = False, **state: Any
) -> None:
    """Notes the files of tensors that the ranks of this kind write, in place of
    ``Checkpointer.save``."""
    tensors, holders = dict[str, Any](), dict[str, tuple[int, ...]]()
    names = parameter_names(state)
    for key, x in state.items():
        collect(key, x, names, tensors, holders)
    folder = os.path.join(self.folder, f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    for rank, nbytes in plan_writes(tensors, holders).nbytes_of_ranks().items():
        if nbytes:
            file = os.path.join(folder, file_of(rank))
            with open(file, "wb"):
                files.saved[files.absolute(file)] = nbytes


# Data and objects ---------------------------------------------------------------------------------


def _refuse_array(usual: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor) and self.constant is None:
            raise SimulationError(
                f"{user_line()} reads all data of a tensor by numpy(), and tensors have no data in "
                "a simulation. Read single numbers by item() or tolist(), which return values= of "
                f"simulate. {_WAY_OUT}"
            )
        return usual(self, *args, **kwargs)

    return numpy


def _refuse_objects(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise SimulationError(
            f"{name} at {user_line()} exchanges Python objects with other ranks, which do not run "
            f"in a simulation. Send a number by dt.broadcast_value, or a tensor. {_WAY_OUT}"
        )

    return call


def _init(usual: Callable[..., Any], rank: int, world: int, *args: Any, **kwargs: Any) -> None:
    """Takes part in the simulated world, which has started already. Raises SimulationError if the
    program asks for another one."""
    if args[:1] == ("fake",):
        usual(*args, **kwargs)
        return
    for name, asked, own in (("rank", kwargs.get("rank"), rank),
                             ("world_size", kwargs.get("world_size"), world)):  # fmt: skip
        if asked not in (None, -1, own):
            raise SimulationError(
                f"init_process_group at {user_line()}: {name}={asked}, and the simulated {name} is "
                f"{own}. Leave {name}= out: it is read from the environment, as under torchrun"
            )
    if not dist.is_initialized():  # after destroy_process_group
        start_fake_world(rank, world)
