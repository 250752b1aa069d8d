"""Checkpointer: saves a training run and resumes it on any mesh."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disttensor.checkpoint import background_writer, folder
from disttensor.checkpoint.state import Tensors, check_loadable, collect, parameter_names, restore
from disttensor.checkpoint.synced_file import Sums, SyncedFile
from disttensor.checks import check_bool, check_int, check_type
from disttensor.comm import compare_programs, objects
from disttensor.comm.groups import Group, new_group
from disttensor.comm.process_group import world
from disttensor.errors import MismatchError
from disttensor.progress import Advance, bar, show_nothing
from disttensor.random import counter
from disttensor.tensor.dist_tensor import DistTensor

VALUES = "values.pt"
RANDOM = "random"
_KINDS = (OSError, ValueError, TypeError, MismatchError, RuntimeError)
_gather = partial(objects.gather_results, kinds=_KINDS)
_run_on_all_ranks = partial(objects.run_on_all_ranks, kinds=_KINDS)


class _Job(NamedTuple):
    """One save: the part that this rank writes, and its path."""

    step: int
    path: Path
    planner: Any
    plan: Any
    metadata: Any
    values: dict[str, Any]
    error: Exception | None = None  # of making the copies


class Checkpointer:
    """Keeps the newest ``keep`` checkpoints of a run in ``folder``, which all ranks share.

    ``save(step, model=..., optimizer=...)`` accepts models, optimizers, objects with ``state_dict``
    and ``load_state_dict`` (schedulers, scalers, a ``shard_loader``), tensors, lists and dicts.
    ``load`` with the same names fills them and returns the step, or None without a checkpoint.
    The random state is saved too. All ranks make the same calls, on any mesh and any number of
    processes; an error is raised on all of them. Several objects may save and load at the same
    time, also in one folder.

    >>> import tempfile
    >>> model = torch.nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     checkpoints = dt.Checkpointer(runs, keep=2)
    ...     step = checkpoints.load(model=model) or 0
    ...     checkpoints.save(step + 50, model=model, notes={"lr": 0.1})
    ...     checkpoints.load(model=model)
    50
    """

    def __init__(self, folder: str | Path, keep: int | None = 3) -> None:
        check_type("Checkpointer: folder", folder, (str, Path), "a path")
        if keep is not None:
            check_int("Checkpointer: keep", keep, 1)
        self.folder, self.keep = Path(folder), keep
        self._saving: Future[None] | None = None  # its error is the same on all ranks
        self._memory: dict[Any, torch.Tensor] = {}  # copies of the save before
        self._planned: tuple[Any, Any] = None, None  # the tensors of the last plan, and the plan

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the newest last."""
        return [saved.step for saved in folder.complete(self.folder)]

    @background_writer.hold_lock()
    def save(self, step: int, *, background: bool = False, **state: Any) -> None:
        """Saves ``state`` atomically. Raises MismatchError if the ranks have not run the same
        program up to the last optimizer step.

        ``background``: copies the state, and writes it while training goes on. The next call of
        this object waits for the writer, and raises its error.
        """
        step = check_int("Checkpointer.save: step", step, 0)
        check_bool("Checkpointer.save: background", background)
        self._wait()
        what = f"Checkpointer.save into {self.folder.name}, step {step}"
        group = _group()
        tensors: Tensors = {}
        values: dict[str, Any] = {}

        def prepare() -> tuple[Any, str, str, dict[Any, str], bytes]:
            compare_programs.check()
            if RANDOM in state:
                raise ValueError(f"{RANDOM}= is a name that the checkpointer needs itself")
            names = parameter_names(state)
            for key, x in state.items():
                values[key] = collect(key, x, names, tensors)
                check_loadable(key, values[key])
            path = folder.begin(self.folder, step) if group.index == 0 else None
            states = {key: v.pop("state") for key, v in values.items() if v["kind"] == "optimizer"}
            digests, firsts = _by_mesh(states, group.index)
            digests |= {(key, ()): _digest(value) for key, value in values.items()}
            regular = {name: x for name, x in tensors.items() if type(x) is torch.Tensor}
            digests |= {(name, ()): _digest(x) for name, x in regular.items()}
            generator = torch.get_rng_state()
            values[RANDOM] = {"state": counter.get_state(), "torch": generator}
            return path, _specs(tensors), _digest(generator), digests, _packed(firsts)

        everyone = _gather(what, group, prepare)
        seen: dict[Any, tuple[int, str]] = {}
        for rank, (*_, digests, firsts) in enumerate(everyone):
            for part, digest in digests.items():
                other, expected = seen.setdefault(part, (rank, digest))
                if digest != expected:
                    raise ValueError(
                        f"{what}: {part[0]} is not the same on ranks {other} and {rank}: values "
                        "that differ between ranks have no meaning on another mesh. Save a global "
                        "value, or leave it out"
                    )
            for key, states in _unpacked(firsts).items():
                values[key].setdefault("state", {}).update(states)
        if len({generator for _, _, generator, *_ in everyone}) > 1:
            values[RANDOM]["torch"] = None
        specs = [theirs[1] for theirs in everyone]
        planner, plan, metadata = self._plan(what, group, tensors, specs)
        job = _Job(step, everyone[0][0], planner, plan, metadata, values)
        if not background:
            with bar("saving", sum(map(_bytes, plan.items)), "B") as advance:
                self._write(what, job, group, advance)
            return
        try:
            planner.stage(plan, self._memory)
            self._memory = planner.copies
        except Exception as caught:  # the writer reports it to the other ranks
            job = job._replace(error=caught)
        self._saving = background_writer.start(
            self.folder, partial(self._write, what, job, _group(" writer"))
        )

    def wait(self) -> None:
        """Waits until the background save is complete. Raises its error, on all ranks."""
        if self._saving is not None:
            error = self._saving.exception()
            self._saving = None
            if error is not None:
                raise error

    @background_writer.hold_lock()
    def load(self, step: int | None = None, **state: Any) -> int | None:
        """Fills ``state`` from the newest complete checkpoint, or from the checkpoint of ``step``.
        Returns its step, or None if there is none. ``state`` may be a part of the saved state.

        Raises ValueError, before anything is changed, if a file was modified or ``state`` does not
        match the saved state. The error names the file, the parameter or the entry.
        """
        if step is not None:
            step = check_int("Checkpointer.load: step", step, 0)
        self._wait()
        what, group = f"Checkpointer.load from {self.folder.name}", _group()
        path = _gather(what, group, lambda: self._find(step) if group.index == 0 else None)[0]
        if path is None:
            return None

        def read() -> tuple[int, Any, list[Callable[[], Any]]]:
            tensors: Tensors = {}
            reached = folder.check(path, group.index, group.size)
            values = torch.load(path / VALUES, weights_only=True)
            lacking = [key for key in state if key not in values]
            if lacking:
                there = ", ".join(key for key in values if key != RANDOM)
                raise ValueError(f"{path} has no {lacking[0]}: it has {there}")
            names = parameter_names(state)
            put = [restore(key, x, values[key], names, tensors) for key, x in state.items()]
            return reached, values[RANDOM], [_storage().reading(path, tensors), *put]

        def fill() -> None:
            for put in fills:
                put()
            if random["torch"] is not None:
                torch.set_rng_state(random["torch"])
            counter.set_state(*random["state"])

        reached, random, fills = _run_on_all_ranks(what, group, read)
        _run_on_all_ranks(what, group, fill)
        return reached

    def _wait(self) -> None:
        self.wait()
        background_writer.wait(self.folder)  # of other Checkpointers, which raise their errors

    def _find(self, step: int | None) -> Path | None:
        found = [s for s in folder.complete(self.folder) if step is None or s.step == step]
        if step is not None and not found:
            raise ValueError(
                f"there is no complete checkpoint of step {step} in {self.folder}: the steps are "
                f"{self.steps()}"
            )
        return found[-1].path if found else None

    def _plan(
        self, what: str, group: Group, tensors: Tensors, specs: list[Any]
    ) -> tuple[Any, Any, Any]:
        """Returns the plan of writes; the last plan, if the tensors of all ranks are unchanged."""
        planner = _storage().Staged()
        planner.set_up_planner(tensors, is_coordinator=group.index == 0)
        if self._planned[0] != specs:
            plans = _gather(what, group, planner.create_local_plan)
            self._planned = specs, planner.create_global_plan(plans)
        plans, metadata = self._planned[1]
        return planner, planner.finish_plan(plans[group.index]), metadata

    def _write(self, what: str, job: _Job, group: Group, advance: Advance = show_nothing) -> None:
        writer = _storage().Writer(job.path, advance)

        def write() -> tuple[Any, Sums]:
            if job.error is not None:
                raise job.error
            return writer.write(job.plan, job.planner, group.index), writer.sums

        def publish() -> None:
            writer.finish(job.metadata, [results for results, _ in everyone])
            file: Any = SyncedFile(job.path / VALUES, writer.sums)
            with file:
                torch.save(job.values, file)
            sums = {name: s for _, some in everyone for name, s in some.items()}
            folder.publish(job.path, job.step, {**sums, **writer.sums})
            folder.prune(self.folder, self.keep)

        try:
            everyone = _gather(what, group, write)
            _run_on_all_ranks(what, group, publish if group.index == 0 else lambda: None)
        except Exception:
            if group.index == 0:
                shutil.rmtree(job.path, ignore_errors=True)
            raise


def _packed(states: Any) -> bytes:
    """Returns the file of states that ``check_loadable`` has accepted."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _bytes(item: Any) -> int:
    """Returns the bytes of an item of a plan of writes; 0 if it is no tensor."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _storage() -> Any:
    return import_module("disttensor.checkpoint.storage")


def _group(purpose: str = "") -> Group:
    """Returns a group of all ranks with its own communicator, because the program may continue in
    another thread. The background writer has a separate one."""
    return new_group(range(world()[1]), ("world",), f"checkpoint{purpose}")


def _by_mesh(states: Any, rank: int) -> tuple[dict[Any, str], dict[str, Any]]:
    """Returns, for the states of optimizers: (optimizer, ranks of a mesh) -> digest of the states
    there, and optimizer -> states that this rank, the first of their mesh, reports."""
    parts: dict[Any, Any] = {}
    firsts: dict[str, Any] = {key: {} for key in states}
    for key, state in states.items():
        for name, (ranks, tree) in state.items():
            parts.setdefault((key, (*ranks, "state")), {})[name] = tree
            if rank == (ranks or (0,))[0]:
                firsts[key][name] = tree
    return {part: _digest(trees) for part, trees in parts.items()}, firsts


def _specs(tensors: Tensors) -> str:
    """Returns a value that changes if the inputs of a plan change."""
    digest = hashlib.blake2b(digest_size=16)
    known: dict[Any, str] = {}
    for name, x in tensors.items():
        kind = x.spec if isinstance(x, DistTensor) else (x.shape, x.dtype)
        if kind not in known:
            mesh = (x.spec.mesh, x.spec.mesh.ranks) if isinstance(x, DistTensor) else None
            known[kind] = f"{kind} {mesh}"
        digest.update(f"{name} {known[kind]}\n".encode())
    return digest.hexdigest()


def _digest(value: Any) -> str:
    """Returns a digest of the values in a tree."""
    digest = hashlib.blake2b(digest_size=16)

    def add(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            digest.update(repr((tuple(x.shape), x.dtype)).encode())
            if not x.is_meta:
                digest.update(objects.digest(x).encode())
        elif isinstance(x, (Mapping, list, tuple)):
            digest.update(f"{len(x)}".encode())
            for part in x.items() if isinstance(x, Mapping) else x:
                add(part)
        else:
            digest.update(f"{type(x).__name__} {x!r}\n".encode())

    add(value)
    return digest.hexdigest()
