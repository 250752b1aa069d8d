"""pretrained.load: Hugging Face's files into a model of which each rank reads its own pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttensor.checkpoint.safetensors_files import Stored, read_box, stored_in
from disttensor.checkpoint.save_pretrained import INDEX, ONE_FILE, check_names, renamed
from disttensor.checkpoint.synced_file import path_inside
from disttensor.checks import check_bool, check_sequence, check_type
from disttensor.core.layout import Box
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.nn.names import close_to
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import check_module, check_plan, shard_module
from disttensor.progress import bar
from disttensor.tensor.checkpointable import prepare_to_read
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
Part = tuple[Stored, int, int]  # the rows [start, stop) of a tensor in a file


def load_pretrained(
    model: nn.Module,
    files: str | Path | Iterable[str | Path],
    mesh: ProcessMesh | None = None,
    plan: Any = None,
    *,
    names: Mapping[str, Any] | Callable[[str], Any] | None = None,
    strict: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Loads safetensors files into ``model``, and returns it. The files are a folder that
    ``pretrained.save`` or Hugging Face wrote, one file, or several. Every rank makes the call and
    reads the pieces that it holds; nothing is sent.

    With a ``mesh`` the model is first sharded by ``plan`` (``shard_module``). A model on the meta
    device is materialized shard by shard. Tensors of such a model that the files lack (buffers that
    are not saved) are initialized by ``init(module)``, else as in ``shard_module``; in a
    transformers model by its ``_init_weights``.

    ``names``: name in the model -> its place in the files, as a function or a dict of the names
    that differ. A place is another name; a list of names, joined along dim 0 (q, k and v of a fused
    ``qkv``); or ``(name, slice)``, some rows of a tensor. Values are cast to the dtype of the
    model. Raises FileNotFoundError, and ValueError for names and shapes that do not fit, before the
    model is changed; ``strict=False`` allows missing and unexpected names.

    >>> import tempfile
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dt.pretrained.save(torch.nn.Linear(4, 2), folder)
    ...     model = dt.pretrained.load(model, folder, mesh, {"weight": [dt.Shard(0), dt.Shard(1)]})
    >>> model.weight.dims_mapping
    [0, 1]
    """
    check_module("pretrained.load: model", model)
    check_plan("pretrained.load", plan, init)
    check_bool("pretrained.load: strict", strict)
    check_names("pretrained.load", names)
    if mesh is None:
        return load_into(model, files, None, names, strict, init)
    mesh = as_mesh("pretrained.load: mesh", mesh)
    shard = partial(shard_module, model, mesh, plan)
    return load_into(model, files, lambda init: shard(init=init), names, strict, init)


def load_into(
    model: nn.Module,
    files: str | Path | Iterable[str | Path],
    shard: Callable[[Callable[[nn.Module], Any]], Any] | None = None,
    names: Any = None,
    strict: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Implements ``load_pretrained``. ``shard(init)`` shards the model, after its names are
    checked; ``init`` is for the modules with a tensor that the files lack."""
    stored = {k: v for path in _paths(files) for k, v in stored_in(path).items()}
    parts = find_parts("pretrained.load", "the files", model, stored, names, strict)
    if shard is not None:
        shard(_init_missing(model, parts, init))
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    meta = [name for name in parts if state[name].is_meta]
    if meta:
        raise ValueError(
            f"pretrained.load: {meta[0]} is on the meta device; give mesh= and plan=, or shard the "
            "model first"
        )
    sizes = {name: _local(state[name]).nbytes for name in parts}
    with bar("loading", sum(sizes.values()), "B") as advance:
        for name, found in parts.items():
            _fill(state[name], found)
            advance(sizes[name])
    return model


def _paths(files: Any) -> list[Path]:
    if not isinstance(files, (str, Path)):
        expected = "a path, or a list of paths,"
        listed = check_sequence("pretrained.load: files", files, expected)
        for file in listed:
            check_type("pretrained.load: files: entry", file, (str, Path), "a path")
        return [Path(file) for file in listed]
    path = Path(files)
    if not path.is_dir():
        return [path]
    if (path / INDEX).exists():
        weights = json.loads((path / INDEX).read_text())["weight_map"]
        return [path_inside(path, name) for name in sorted(set(weights.values()))]
    if (path / ONE_FILE).exists():  # others may be of a save that did not end
        return [path / ONE_FILE]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"pretrained.load: {path} has no *.safetensors")
    return found


def find_parts(
    who: str, where: str, model: nn.Module, stored: dict[str, Stored], names: Any, strict: bool,
    copies: bool = True,
) -> dict[str, list[Part]]:  # fmt: skip
    """Returns name in the model -> stored parts. Of tied tensors the last name counts, as in
    ``load_state_dict``; without ``copies`` it is an error if they have several values. ``who`` and
    ``where``: the call and what stores the parts, in errors."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    parts: dict[str, list[Part]] = {}
    lost, used, known = dict[int, str](), set[str](), dict[int, str]()
    for name, value in state.items():
        found = _sources(renamed(name, names), stored)
        used.update(one.name for one, _, _ in found or ())
        if not isinstance(value, Tensor):
            continue
        if found is None:
            lost[id(value)] = name
            continue
        shape = tuple(found[0][0].shape)
        if value.ndim and shape:
            shape = (sum(stop - start for _, start, stop in found), *shape[1:])
        odd = [one.name for one, _, _ in found if one.shape[1:] != shape[1:]]
        if shape != tuple(value.shape) or odd:
            raise ValueError(
                f"{who}: {name!r} is {list(value.shape)} in the model, and "
                f"{list(shape)} in {found[0][0].path}"
            )
        tied = known.get(id(value))
        if tied is not None:
            places = [[(one.begin, *rows) for one, *rows in of] for of in (parts[tied], found)]
            if not copies and places[0] != places[1]:
                raise ValueError(
                    f"{who}: {tied!r} and {name!r} are one tensor in the model, and two in {where}"
                )
            del parts[tied]
        parts[name], known[id(value)] = found, name
    missing = [name for key, name in lost.items() if key not in known]
    unexpected = [name for name in stored if name not in used]
    if strict and (missing or unexpected):
        text = []
        if missing:
            near = close_to(missing[0], unexpected or stored)
            hint = f" (near: {near[0]!r})" if near else ""
            text.append(f"{where} lack {missing[:5]} of {len(missing)}{hint}")
        if unexpected:
            text.append(f"the model has no {unexpected[:5]} of {len(unexpected)}")
        raise ValueError(
            f"{who}: {'; '.join(text)}. Pass names=, which maps names of the model to "
            f"names in {where}, or strict=False"
        )
    return parts


def _sources(where: Any, stored: dict[str, Stored]) -> list[Part] | None:
    """Returns the parts that ``where`` names, None if a part is not in the files."""
    out = []
    for one in where if isinstance(where, list) else [where]:
        name, rows = one if isinstance(one, tuple) else (one, slice(None))
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise ValueError(
                f"pretrained.load: names: {one!r}: the rows of a tensor are a slice without a step"
            )
        if name not in stored:
            return None
        shape = stored[name].shape
        start, stop, _ = rows.indices(shape[0] if shape else 1)
        out.append((stored[name], start, max(start, stop)))
    return out


def _init_missing(model: nn.Module, parts: dict[str, Any], init: Any) -> Callable[[nn.Module], Any]:
    """Returns an ``init`` for the modules with a tensor that the files lack."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in parts}
    lacking = {
        s.owner: s.name for s in slots(model) if s.value.is_meta and id(s.value) not in filled
    }
    chosen = init or getattr(model, "_init_weights", None)
    for module, name in lacking.items():
        if chosen is None and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"pretrained.load: {name!r} is on the meta device, and neither the files nor its "
                f"{type(module).__name__} give it values: pass init=function(module)"
            )

    def made(module: nn.Module) -> None:
        if module in lacking:
            own: Any = module
            own.reset_parameters() if chosen is None else chosen(module)

    return made


def _local(x: Any) -> Tensor:
    return x.local if isinstance(x, DistTensor) else x


def _fill(x: Any, parts: list[Part]) -> None:
    """Reads the piece of this rank, part by part."""
    if isinstance(x, DistTensor):
        box = prepare_to_read(x)
        if box is None:
            return
        local = x.local.detach()
    else:
        box, local = Box((0,) * x.ndim, tuple(x.shape)), x.detach()
    for n, source, target in locate(box, parts):
        read_box(parts[n][0], source, target.cut(local, box))


def locate(box: Box, parts: Sequence[Part]) -> Iterator[tuple[int, Box, Box]]:
    """Yields what ``box`` of a tensor takes from the parts that form it: the number of the part,
    the box in the stored tensor, and its place in the tensor."""
    at = 0  # the row at which the part begins
    for n, (_, start, stop) in enumerate(parts):
        if not box.shape:
            yield n, box, box
            return
        mine = box.intersect(Box((at, *box.offset[1:]), (stop - start, *box.shape[1:])))
        if mine is not None:
            yield n, Box((mine.offset[0] - at + start, *mine.offset[1:]), mine.shape), mine
        at += stop - start
