"""Checkpointer: saves a training run and resumes it on any mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disttensor.checkpoint import background_writer, dcp_metadata
from disttensor.checkpoint.folder import LocalFolder, read_mark
from disttensor.checkpoint.object_folder import ObjectFolder
from disttensor.checkpoint.saved_layout import WritePlan, plan_writes
from disttensor.checkpoint.state import Tensors, check_loadable, collect, parameter_names, restore
from disttensor.checkpoint.synced_file import Sums
from disttensor.checkpoint.tensor_file import Reader, file_of, write_pieces
from disttensor.checkpoint.values_file import SavedValues, file_of_values, read_values
from disttensor.checks import check_bool, check_int, check_type
from disttensor.comm import compare_programs, objects
from disttensor.comm.groups import Group, world_group
from disttensor.errors import MismatchError
from disttensor.progress import Advance, bar, show_nothing
from disttensor.random import counter
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, local_of

RANDOM = "random"
_KINDS = (OSError, ValueError, TypeError, MismatchError, RuntimeError)
_gather = partial(objects.gather_results, kinds=_KINDS)
_run_on_all_ranks = partial(objects.run_on_all_ranks, kinds=_KINDS)
_Ranks = tuple[int, ...]
_Facts = dict[_Ranks, dict[str, str]]  # ranks that have the same -> what -> its digest


class _Job(NamedTuple):
    """One save: the part that this rank writes, and its path."""

    step: int
    path: Path
    plan: WritePlan
    tensors: Mapping[str, Any]  # of the pieces
    values: SavedValues
    error: Exception | None = None  # of making the copies


class Checkpointer:
    """Keeps the newest ``keep`` checkpoints of a run in ``folder``, which all ranks share:
    a path, or a URL of fsspec, such as ``s3://bucket/run``.

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
        is_url = "://" in str(folder)
        self.folder: str | Path = str(folder) if is_url else Path(folder)
        self.keep = keep
        self._files = ObjectFolder(str(folder)) if is_url else LocalFolder(Path(folder))
        self._saving: Future[None] | None = None  # its error is the same on all ranks
        self._memory: dict[str, torch.Tensor] = {}  # copies of the save before

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the newest last."""
        return [saved.step for saved in self._files.complete()]

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
        what = f"Checkpointer.save into {self._files.name}, step {step}"
        group = _group()
        tensors: Tensors = {}
        values: dict[str, Any] = {}
        facts: _Facts = {}

        def prepare() -> tuple[str, str, dict[str, str]]:
            compare_programs.check()
            if RANDOM in state:
                raise ValueError(f"{RANDOM}= is a name that the checkpointer needs itself")
            names, holders = parameter_names(state), dict[str, _Ranks]()
            for key, x in state.items():
                values[key] = collect(key, x, names, tensors, holders)
                check_loadable(key, values[key])
            states = {key: v.pop("state") for key, v in values.items() if v["kind"] == "optimizer"}
            plans.append(plan_writes(tensors, holders))
            facts.update(_facts(values, states, tensors, holders, plans[0]))
            generator = torch.get_rng_state()
            values[RANDOM] = {"state": counter.get_state(), "torch": generator}
            parts.append(_part_of(group.index, values, states, plans[0]))
            name = self._files.begin(step).name if group.index == 0 else ""
            return name, _digest(generator), {_digest(r): _digest(f) for r, f in facts.items()}

        plans: list[WritePlan] = []
        parts: list[SavedValues] = []
        everyone = _gather(what, group, prepare)
        _compare(what, group, [digests for *_, digests in everyone], facts)
        if len({generator for _, generator, _ in everyone}) > 1:
            values[RANDOM]["torch"] = None
        plan = plans[0]
        path = self._files.path / everyone[0][0]
        job = _Job(step, path, plan, {n: tensors[n] for n in plan.pieces}, parts[0])
        if not background:
            with bar("saving", plan.nbytes(), "B") as advance:
                self._write(what, job, group, advance)
            return
        try:
            self._memory = _copies(job.tensors, self._memory)
            job = job._replace(tensors=self._memory)
        except Exception as caught:  # the writer reports it to the other ranks
            job = job._replace(error=caught)
        self._saving = background_writer.start(
            self._key(), partial(self._write, what, job, _group(" writer"))
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
        what, group = f"Checkpointer.load from {self._files.name}", _group()
        name = _gather(what, group, lambda: self._find(step) if group.index == 0 else None)[0]
        if name is None:
            return None
        path = self._files.path / name

        def read() -> tuple[int, Any, list[Callable[[], Any]]]:
            tensors: Tensors = {}
            reached, files = read_mark(self._files, path)
            saved = read_values(self._files, path, files)
            values = saved.values
            lacking = [key for key in state if key not in values]
            if lacking:
                there = ", ".join(key for key in values if key != RANDOM)
                raise ValueError(f"{path} has no {lacking[0]}: it has {there}")
            names = parameter_names(state)
            put = [restore(key, x, values[key], names, tensors) for key, x in state.items()]
            reader = Reader(self._files, path, files, saved.layouts, tensors)
            reader.check()
            return reached, values[RANDOM], [reader.fill, *put]

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
        background_writer.wait(self._key())  # of other Checkpointers, which raise their errors

    def _key(self) -> str:
        """Returns a name of the folder that is the same for all its Checkpointers."""
        return self._files.key or str(Path(self.folder).resolve())

    def _find(self, step: int | None) -> str | None:
        found = [s for s in self._files.complete() if step is None or s.step == step]
        if step is not None and not found:
            raise ValueError(
                f"there is no complete checkpoint of step {step} in {self.folder}: the steps are "
                f"{self.steps()}"
            )
        return found[-1].path.name if found else None

    def _write(self, what: str, job: _Job, group: Group, advance: Advance = show_nothing) -> None:
        files, sums = self._files, Sums()

        def write() -> Sums:
            if job.error is not None:
                raise job.error
            if job.plan.pieces:
                name = file_of(group.index)
                with files.create(job.path, name, sums, advance) as data:
                    write_pieces(data, job.plan.pieces, job.tensors)
            if any(job.values):
                file: Any = files.create(job.path, file_of_values(group.index), sums)
                with file:
                    torch.save(tuple(job.values), file)
            return sums

        def publish() -> None:
            every = {name: s for some in everyone for name, s in some.items()}
            files.check_sizes(job.path, every)
            data = dcp_metadata.metadata_of(files, job.path, every, dcp_metadata.MOST)
            if data is not None:
                with files.create(job.path, dcp_metadata.FILE, every) as file:
                    file.write(data)
            files.publish(job.path, job.step, every)
            files.prune(self.keep)

        try:
            everyone = _gather(what, group, write)
            _run_on_all_ranks(what, group, publish if group.index == 0 else lambda: None)
        except Exception:
            if group.index == 0:
                files.discard(job.path)
            raise


def _copies(
    tensors: Mapping[str, torch.Tensor], memory: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns copies of pieces. ``memory``: buffers of the previous save, which are used again."""
    copies = {}
    for name, x in tensors.items():
        data, old = local_of(x), memory.get(name)
        if old is None or (old.shape, old.dtype) != (data.shape, data.dtype):
            old = torch.empty(data.shape, dtype=data.dtype)
        copies[name] = old.copy_(data, non_blocking=True)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copies


def _group(purpose: str = "") -> Group:
    """Returns a group of all ranks with its own communicator, because the program may continue in
    another thread. The background writer has a separate one."""
    return world_group(f"checkpoint{purpose}")


def _facts(
    values: Any, states: Any, tensors: Tensors, holders: Mapping[str, _Ranks], plan: WritePlan
) -> _Facts:
    """Returns digests of the parts that are equal on all ranks that have them; (): on all ranks."""
    facts: _Facts = {(): {key: _digest(value) for key, value in values.items()}}
    for key, of in states.items():
        for name, (ranks, tree) in of.items():
            facts.setdefault(ranks, {})[f"{key}, the state of {name},"] = _digest(tree)
    for name, layout in plan.layouts.items():
        x = tensors[name]
        if isinstance(x, DistTensor):
            if x._view_state is not None:
                views.check(x)
            facts.setdefault(layout.mesh[0], {})[f"the layout of {name}"] = str(layout)
        else:
            facts.setdefault(holders.get(name, ()), {})[name] = _digest(x)
    return facts


def _compare(what: str, group: Group, everyone: list[dict[str, str]], facts: _Facts) -> None:
    """Raises ValueError on all ranks if facts differ. Only then the ranks exchange the facts."""
    seen: dict[str, str] = {}
    if all(seen.setdefault(r, fact) == fact for of in everyone for r, fact in of.items()):
        return
    known: dict[Any, tuple[int, str]] = {}
    mine = {(hashed, name): d for r, of in facts.items() for name, d in of.items()
            for hashed in [_digest(r)]}  # fmt: skip
    for rank, of in enumerate(_gather(what, group, lambda: mine)):
        for (ranks, name), digest in of.items():
            other, expected = known.setdefault((ranks, name), (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{what}: {name} is not the same on ranks {other} and {rank}: values "
                    "that differ between ranks have no meaning on another mesh. Save a global "
                    "value, or leave it out"
                )
    raise ValueError(f"{what}: the ranks save tensors of different names")


def _part_of(rank: int, values: Any, states: Any, plan: WritePlan) -> SavedValues:
    """Returns the values that this rank writes: the values of meshes whose first rank it is."""
    mine = {
        key: {name: tree for name, (ranks, tree) in of.items() if (ranks or (0,))[0] == rank}
        for key, of in states.items()
    }
    layouts = {n: tuple(of) for n, of in plan.layouts.items() if of.mesh[0][0] == rank}
    if rank == 0:
        return SavedValues(values, mine, layouts)
    return SavedValues({}, {key: of for key, of in mine.items() if of}, layouts)


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
        elif isinstance(x, (set, frozenset)):  # in any order
            add(sorted(map(repr, x)))
        else:
            digest.update(f"{type(x).__name__} {x!r}\n".encode())

    add(value)
    return digest.hexdigest()
