"""one_process: other libraries find one process, and one rank writes.

Libraries that find several processes deal out batches, wrap models and sum results themselves. In a
program on DistTensors every rank has the global values already.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from disttensor.callbacks import set_during
from disttensor.checks import check_type
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_objects, run_on_all_ranks
from disttensor.comm.process_group import environment_set, join_world, world
from disttensor.core.mesh import check_device_type
from disttensor.integrations.model import gathered_pickles
from disttensor.patches.change import Undo, once_imported
from disttensor.pytree import substitute
from disttensor.tensor.copies import PICKLES, gathered_value
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import hide_world

Tensor = torch.Tensor

# Variables with ranks and sizes, set by torchrun, Slurm, Open MPI, MPICH, Intel MPI, MVAPICH. The
# other variables of torchrun stay: disttensor reads them when it creates groups.
LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class Process:
    """The value of ``with one_process() as process``. ``is_first``: this rank writes."""

    is_first: bool
    _folders: ExitStack

    def folder(self, path: str | Path) -> Path:
        """Returns ``path`` on the first rank. On the other ranks it returns a new temporary folder,
        which is removed at the end of the block, for a library that writes on every rank."""
        check_type("Process.folder: path", path, (str, Path), "a path")
        if self.is_first:
            return Path(path)
        return Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="disttensor-")))

    @contextmanager
    def saving(self, path: str | Path) -> Iterator[Path]:
        """Lets a library save by its own function: all ranks run the block, and save the same.

        In the block, pickles (``torch.save``), safetensors files and ``numpy()`` of DistTensors
        hold full values, which all ranks gather, and accelerate's ``is_main_process`` is True. The
        block gets a folder: ``path`` on the first rank, which is made if it is not there, and a
        temporary folder on the other ranks. After the block the files are complete.

        Raises:
            OSError: the first rank cannot make the folder; on all ranks.
            MismatchError: the ranks save different tensors; on all ranks.

        >>> with one_process() as process, process.saving("folder") as folder:  # doctest: +SKIP
        ...     torch.save(model.state_dict(), folder / "model.pt")
        """
        check_type("Process.saving: path", path, (str, Path), "a path")
        with tempfile.TemporaryDirectory(prefix="disttensor-") as other:
            folder = Path(path if self.is_first else other)
            make = partial(folder.mkdir, parents=True, exist_ok=True)
            run_on_all_ranks("Process.saving", world_group(), make, [OSError])
            with gathered_pickles():
                yield folder
        _wait("Process.saving")


@contextmanager
def one_process(device_type: str | None = None) -> Iterator[Process]:
    """Makes other libraries find one process, in a ``with`` block or a decorated function.

    All ranks run the block. It starts the process group, unless ``init_mesh`` has done so. Inside,
    ``torch.distributed.is_initialized()`` is False, and the environment has no variable of a
    launcher that names a rank or a number of processes. The earlier state of accelerate is not
    used. On all ranks but the first, tqdm shows no bars, ``logging`` shows errors only, wandb is
    disabled, and accelerate's ``is_main_process`` is False. ``wait_for_everyone`` waits for all
    ranks. A pickle of a DistTensor holds its full value, as a regular tensor, or raises an error if
    this rank has a piece only. All of this ends with the block. DistTensors communicate as before.

    Args:
        device_type: "cpu" or "cuda", as for ``init_mesh``. With "cuda" a rank that has not used
            CUDA yet sees only its own device, also after the block: libraries take the first one.

    Yields:
        A Process: ``process.is_first`` is True on the rank that writes, and
        ``process.folder(path)`` returns a temporary folder on the other ranks.

    Raises:
        RuntimeError: code in the block started a process group.

    >>> with dt.integrations.one_process() as process:
    ...     torch.distributed.is_initialized(), process.is_first, dt.ones(2, mesh=mesh).sum().item()
    (False, True, 2.0)
    """
    check_device_type("one_process", device_type)
    if device_type == "cuda":
        _see_own_device()
    join_world(device_type)
    first = world()[0] == 0
    with ExitStack() as around:
        around.enter_context(hide_world())
        quiet = {} if first else {"WANDB_MODE": "disabled"}
        around.enter_context(environment_set(dict.fromkeys(LAUNCHERS) | quiet))
        around.enter_context(set_during(PICKLES, "full"))
        around.callback(once_imported("accelerate.state", partial(_accelerate, first)))
        around.callback(once_imported("accelerate.utils.operations", _broadcasts))
        around.callback(once_imported("safetensors.torch", _safetensors))
        around.callback(once_imported("transformers.modeling_utils", _save_pretrained))
        around.callback(
            once_imported("transformers.training_args", partial(_main_process_first, first))
        )
        if not first:
            around.callback(logging.disable, logging.root.manager.disable)
            logging.disable(max(logging.root.manager.disable, logging.WARNING))
            around.callback(once_imported("tqdm.std", _no_bars))
        yield Process(first, around)


def _see_own_device() -> None:
    """Sets CUDA_VISIBLE_DEVICES to the device of this rank, then number 0. CUDA reads it once."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not torch.cuda.is_initialized() and (number < len(seen) or not seen):
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[number] if seen else str(number)
        os.environ["LOCAL_RANK"] = "0"


# Properties and decorators of accelerate's PartialState that select the process that writes.
_MAIN = ("is_main_process", "is_local_main_process", "is_last_process")
_ON = (
    "on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process",
)  # fmt: skip


def _accelerate(first: bool, state: Any) -> Undo:
    """Drops the state of accelerate, which is determined once and shared by all its objects, and
    makes it wait for all ranks and write on the first. ``process_index`` stays 0 on all ranks: it
    also numbers the parts of a batch."""
    shared = [kind._shared_state for kind in (state.PartialState, state.AcceleratorState)]
    before = [dict(values) for values in shared]
    for values in shared:
        values.clear()

    def only_first(self: Any, function: Any = None, *_: Any, **__: Any) -> Any:
        if function is None:
            return partial(only_first, self)
        return function if self.is_main_process else state.do_nothing

    changes: dict[str, Any] = {"wait_for_everyone": lambda self: _wait("wait_for_everyone")}
    if not first:  # all ranks run the hooks that write to the folder of a rank
        changes |= dict.fromkeys(_MAIN, property(lambda self: PICKLES.get() == "gather"))
        changes |= dict.fromkeys(_ON, only_first)
    originals = {name: vars(state.PartialState)[name] for name in changes}
    for name, value in changes.items():
        setattr(state.PartialState, name, value)

    def undo() -> None:
        for name, value in originals.items():
            setattr(state.PartialState, name, value)
        for values, earlier in zip(shared, before, strict=True):
            values.clear()
            values.update(earlier)

    return undo


def _wait(who: str) -> None:
    run_on_all_ranks(who, world_group(), lambda: None)


def _main_process_first(first: bool, module: Any) -> Undo:
    """Lets the first rank enter the blocks of ``TrainingArguments.main_process_first`` first."""
    kind = module.TrainingArguments
    before = vars(kind)["main_process_first"]

    @contextmanager
    def main_process_first(self: Any, local: bool = True, desc: str = "work") -> Iterator[None]:
        if not first:
            _wait(f"main_process_first: {desc}")
        try:
            yield
        finally:
            if first:
                _wait(f"main_process_first: {desc}")

    kind.main_process_first = main_process_first
    return partial(setattr, kind, "main_process_first", before)


def _broadcasts(module: Any) -> Undo:
    """Makes ``broadcast_object_list`` of accelerate send the list of the first rank."""
    before = module.broadcast_object_list

    @wraps(before)
    def broadcast(object_list: list[Any], from_process: int = 0) -> list[Any]:
        object_list[:] = gather_objects([*object_list], world_group(), any_class=True)[0]
        return object_list

    def exchange(old: Any, new: Any) -> None:
        for holder in [*sys.modules.values()]:  # other modules import it by name
            if getattr(holder, "__dict__", {}).get(before.__name__) is old:
                setattr(holder, before.__name__, new)

    exchange(before, broadcast)
    return partial(exchange, broadcast, before)


def _safetensors(module: Any) -> Undo:
    """Makes safetensors write the full values where all ranks make the same files."""
    name = "_flatten_as_ptr" if hasattr(module, "_flatten_as_ptr") else "_flatten"
    before = getattr(module, name)

    def full(x: Any) -> Tensor:
        value = gathered_value(x)
        return value if world()[0] == 0 else value.new_empty(0)

    @wraps(before)
    def flatten(tensors: Any, *args: Any) -> Any:
        is_gathered = PICKLES.get() == "gather"
        return before(substitute(tensors, full, DistTensor) if is_gathered else tensors, *args)

    setattr(module, name, flatten)
    return partial(setattr, module, name, before)


def _save_pretrained(module: Any) -> Undo:
    """Gives ``save_pretrained`` of transformers full values where all ranks make the same files; it
    looks for tied weights by their addresses. The first rank writes."""
    kind = module.PreTrainedModel
    before = kind.save_pretrained

    @wraps(before)
    def save(self: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        if PICKLES.get() == "gather":
            found = self.state_dict(keep_vars=True) if state_dict is None else state_dict
            held = {id(x): x for x in found.values() if isinstance(x, DistTensor)}
            full = {key: gathered_value(x) for key, x in held.items()}  # tied weights once
            if world()[0] != 0:
                return None
            state_dict = {name: full.get(id(x), x) for name, x in found.items()}
        return before(self, *args, state_dict=state_dict, **kwargs)

    kind.save_pretrained = save
    return partial(setattr, kind, "save_pretrained", before)


def _no_bars(tqdm: Any) -> Undo:
    before, made = vars(tqdm.tqdm)["__init__"], tqdm.tqdm.__init__

    @wraps(made)
    def hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs | {"disable": True})

    tqdm.tqdm.__init__ = hidden
    return partial(setattr, tqdm.tqdm, "__init__", before)
