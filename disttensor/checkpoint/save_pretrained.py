"""pretrained.save: a model on any meshes as the files that ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttensor.checkpoint.safetensors_files import Stored, plan_file, write_rows
from disttensor.checkpoint.synced_file import SyncedFile, sync_folder
from disttensor.checks import argument_error, check_int, check_type, is_int
from disttensor.comm import objects
from disttensor.comm.agree import agree
from disttensor.comm.groups import world_group
from disttensor.comm.objects import run_on_all_ranks
from disttensor.comm.process_group import world
from disttensor.core.layout import Layout
from disttensor.core.spec import DistSpec
from disttensor.nn.shard_module import check_module
from disttensor.progress import Advance, bar
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    names: Mapping[str, str] | Callable[[str], str] | None = None,
) -> None:
    """Writes ``model`` to ``folder`` in the format of Hugging Face: safetensors files of at most
    ``max_shard_size``, an index if there are several, and the config of a transformers model. One
    process reads them with ``from_pretrained``, any mesh with ``pretrained.load``.

    Every rank of the world makes the call. Each rank writes some rows of each tensor directly to
    their place in the file, and holds only the rows of one tensor in addition to its pieces. The
    files get their names when all are complete and synced. A tied weight is written once.
    ``names``: name in the model -> name in the files, as a function or a dict of the names that
    differ. Raises ValueError, before it writes, for values that the format cannot hold. If a rank
    cannot write, raises OSError on all ranks, and existing files stay unchanged.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dt.pretrained.save(dt.shard_module(torch.nn.Linear(4, 2), mesh), folder)
    ...     [path.name for path in pathlib.Path(folder).iterdir()]
    ['model.safetensors']
    """
    check_module("pretrained.save: model", model)
    check_type("pretrained.save: folder", folder, (str, Path), "a path")
    check_names("pretrained.save", names)
    folder = Path(folder)
    tensors = _tensors(model, names)
    files = _files(folder, tensors, _size(max_shard_size))
    first = world()[0] == 0
    regular = {n: objects.digest(x) for n, x in tensors.items() if not isinstance(x, DistTensor)}
    agree("pretrained.save: a regular tensor is one global value, but", world_group(), **regular)

    def write() -> None:
        with bar("saving", sum(x.nbytes for x in tensors.values()), "B") as advance:
            failures = [_write(inside, tensors, advance) for _, inside, _ in files]
        for failure in filter(None, failures):
            raise failure

    who = "pretrained.save: the model is not saved"
    on_all = partial(run_on_all_ranks, who, world_group(), kinds=(OSError,))
    try:
        on_all(lambda: _make(folder, files) if first else None)
        on_all(write)
        on_all(lambda: _publish(model, folder, files) if first else None)
    except OSError:
        for _, inside, _ in files if first else ():
            with contextlib.suppress(OSError):
                inside[0].path.unlink()
        raise


def _tensors(model: nn.Module, names: Any) -> dict[str, Any]:
    """Returns name in the files -> tensor; tied tensors have the name of transformers."""
    aliases: dict[int, list[str]] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"pretrained.save: {name!r} is {type(value).__name__}, no tensor")
        aliases.setdefault(id(value), []).append(name)
    patterns = [
        re.compile(f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    out = {}
    for known in aliases.values():
        main = next((n for n in known if not any(p.search(n) for p in patterns)), known[0])
        out[renamed(main, names)] = state[main]
    if len(out) != len(aliases) or not out:
        raise ValueError("pretrained.save: no tensors, or two tensors with one name in names=")
    return out


def check_names(who: str, names: Any) -> None:
    if names is not None and not callable(names):
        expected = "a dict of names, or a function of a name,"
        check_type(f"{who}: names", names, Mapping, expected)


def renamed(name: str, names: Any) -> Any:
    """Returns the value for ``name`` of a function or a dict of other names."""
    return names(name) if callable(names) else (names or {}).get(name, name)


def _size(limit: int | str) -> int:
    who, expected = "pretrained.save: max_shard_size", "a whole number of bytes, or one like '5GB',"
    if not isinstance(limit, str):
        if is_int(limit) and limit <= 0:
            raise argument_error(who, limit, expected, ValueError)
        return check_int(who, limit, expected=expected)
    number, unit = limit[:-2], limit[-2:].upper()
    if unit not in UNITS or not number.strip().replace(".", "", 1).isdigit():
        raise argument_error(who, limit, expected, ValueError)
    return int(float(number) * UNITS[unit])


def _files(folder: Path, tensors: dict[str, Any], limit: int) -> list[Any]:
    """Returns ``plan_file`` of each file, by its temporary name."""
    groups: list[list[Any]] = [[]]
    filled = 0
    for name, x in tensors.items():
        if groups[-1] and filled + x.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append((name, x.dtype, x.shape))
        filled += x.nbytes
    count = len(groups)
    named = (
        ["model"] if count == 1 else [f"model-{i:05}-of-{count:05}" for i in range(1, count + 1)]
    )
    return [
        plan_file(folder / f".{name}.safetensors.part", group)
        for name, group in zip(named, groups, strict=True)
    ]


def _make(folder: Path, files: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for start, inside, size in files:
        inside[0].path.unlink(missing_ok=True)  # of a save that has failed, or a link
        with inside[0].path.open("xb") as file:
            file.write(start)
            file.truncate(size)


def _by_rows(spec: DistSpec) -> DistSpec:
    """Returns ``spec`` with dim 0 split by all axes of the mesh: contiguous rows."""
    axes = range(spec.mesh.ndim)
    kept = tuple(a for a in spec.layout.dims[0] if a not in {b for b, _ in spec.layout.custom})
    rest = tuple(a for a in axes if a not in kept)
    return spec.with_layout(Layout(((*kept, *rest), *((),) * (spec.ndim - 1))))


def _rows(x: Any) -> tuple[int, Any]:
    """Returns (first row, rows) of ``x`` that this rank writes, or None. All ranks of its mesh
    call it."""
    if not isinstance(x, DistTensor):
        return 0, x if world()[0] == 0 else None
    spec = x.spec.on_root()
    spec = _by_rows(spec) if spec.ndim else spec.replicated()
    with torch.no_grad():
        rows = resharded(x.detach(), spec).local
    if x.spec.ndim:
        return spec.local_box.offset[0], rows if x.is_initialized else None
    return 0, rows if world()[0] == spec.mesh.ranks[0] else None


def _write(inside: list[Stored], tensors: dict[str, Any], advance: Advance) -> Exception | None:
    """Writes this rank's rows of all tensors of a file to the disk. An error is returned at the
    end, because until then other ranks wait for this rank at each tensor."""
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(inside[0].path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            file = stack.enter_context(open(handle, "r+b", buffering=0))
        except OSError as caught:
            error = caught
        for stored in inside:
            at, rows = _rows(tensors[stored.name])
            try:
                if error is None and rows is not None:
                    write_rows(file, stored, at, rows)
            except Exception as caught:
                error = caught
            advance(stored.nbytes)
        try:
            if error is None:
                os.fsync(file.fileno())
        except OSError as caught:
            error = caught
    return error


def _publish(model: nn.Module, folder: Path, files: list[Any]) -> None:
    """Gives the files their final names, and removes files of an earlier model. Each step leaves
    the earlier model or this one: files that the earlier index names stay as they are until this
    index has replaced it in one step, which is on the disk before they are removed."""
    weights: dict[str, str] = {}
    names = [inside[0].path.name[1:].removesuffix(".part") for _, inside, _ in files]
    free, version = names, 1
    while len(files) > 1 and any(map(os.path.lexists, map(folder.joinpath, free))):
        version += 1
        free = [name.replace("model-", f"model-v{version}-", 1) for name in names]
    for (_, inside, _), name in zip(files, free, strict=True):
        inside[0].path.rename(folder / name)
        weights |= {one.name: name for one in inside}
    sync_folder(folder)
    if len(files) > 1:
        total = sum(one.nbytes for _, inside, _ in files for one in inside)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        part = folder / f".{INDEX}.part"
        part.unlink(missing_ok=True)
        with SyncedFile(part, {}) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
        part.rename(folder / INDEX)
    else:
        (folder / INDEX).unlink(missing_ok=True)
    sync_folder(folder)
    for old in (folder / ONE_FILE, *folder.glob("model-*-of-*.safetensors")):
        if old.name not in weights.values():
            old.unlink(missing_ok=True)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        more: Any = getattr(model, "generation_config", None)
        if hasattr(more, "save_pretrained"):
            more.save_pretrained(folder)
