"""Converts the state of a training run to named tensors and a tree of other values, and back.

Tensors have the names of the model's parameters, independent of mesh, stage and sharding:
``model.blocks.0.up.weight``, ``optimizer.state.model.blocks.0.up.weight.exp_avg``. In the tree a
tensor with a name is a meta tensor; small regular tensors, as the optimizers' ``step``, stay.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from disttensor.api.create import empty
from disttensor.api.shard import shard_tensor
from disttensor.nn.names import close_to
from disttensor.optim.owners import like_state
from disttensor.pytree import Path, map_paths, rebuild, refill
from disttensor.tensor.checkpointable import spec_of_boxes
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded
from disttensor.torch_private import outside_modes

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Target = Callable[[Path, Tensor], Any]  # (path, saved tensor) -> its replacement
_DICTS = Counter, OrderedDict  # the classes of dicts that weights_only reads
_SMALL = 64  # elements of a regular tensor that stays in the tree


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Returns id of a parameter -> its name in a checkpoint."""
    models = [(key, x) for key, x in objects.items() if isinstance(x, nn.Module)]
    return {id(p): f"{key}.{name}" for key, model in models for name, p in model.named_parameters()}


def collect(
    key: str, x: Any, names: Mapping[int, str], tensors: Tensors,
    holders: dict[str, tuple[int, ...]] | None = None,
) -> Any:  # fmt: skip
    """Returns the tree of one object, and adds its tensors to ``tensors``. Raises TypeError for
    an object that cannot be loaded. ``holders`` gets the ranks of tensors that some ranks lack."""
    if isinstance(x, nn.Module):
        known: dict[int, str] = {}
        tied, state = {}, {}
        for name, value in x.state_dict(keep_vars=True).items():
            first = known.setdefault(id(value), name) if isinstance(value, Tensor) else name
            if first != name:
                tied[name] = first
            else:
                state[name] = _split(value, f"{key}.{name}", tensors, small=-1)
        return {"kind": "model", "state": state, "tied": tied}
    if isinstance(x, Optimizer):
        options = [{k: v for k, v in g.items() if k not in _LISTS} for g in x.param_groups]
        params = [p for group in x.param_groups for p in group["params"]]
        like = like_state(x)
        held = {_name(p, names, key): (_ranks(like(p)), x.state[p]) for p in params if p in x.state}
        states = {}
        for name, (ranks, of) in held.items():
            if ranks is not None:
                before = len(tensors)
                tree = _split(of, f"{key}.state.{name}", tensors, small=1)
                states[name] = ranks, tree
                if ranks and holders is not None:
                    new = islice(reversed(tensors), len(tensors) - before)
                    holders.update(dict.fromkeys(new, ranks))
        return {
            "kind": "optimizer",
            "params": [[_name(p, names, key) for p in group["params"]] for group in x.param_groups],
            "options": _split(options, f"{key}.options", tensors),
            "state": states,
            "own": _split(_own_state(x), f"{key}.own", tensors),
        }
    if hasattr(x, "state_dict") and hasattr(x, "load_state_dict"):
        return {"kind": "object", "state": _split(x.state_dict(), key, tensors)}
    if isinstance(x, (dict, list, Tensor)):
        return {"kind": "value", "state": _split(x, key, tensors)}
    raise TypeError(
        f"{key}={x!r}: load could not set the value of a {type(x).__name__}. Save an object with "
        f"state_dict and load_state_dict, a tensor, a list or a dict: {key}={{'value': ...}}"
    )


_LISTS = ("params", "param_names")


def _own_state(x: Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer that belongs to no parameter: "state", entries of
    ``x.state`` such as ``x.state["ema"]``; "more", what its class adds to ``state_dict``."""
    whole = {} if type(x).state_dict is Optimizer.state_dict else x.state_dict()
    more = {k: v for k, v in whole.items() if k not in ("state", "param_groups")}
    return {"state": {k: v for k, v in x.state.items() if not isinstance(k, Tensor)}, "more": more}


def _ranks(held: Tensor) -> tuple[int, ...] | None:
    """Returns the ranks that have a state like ``held`` (a rank outside its mesh may have none, or
    an old one); (): all ranks. None if this rank is not among them."""
    if not isinstance(held, DistTensor):
        return ()
    return held.process_mesh.root.ranks if held.is_initialized else None


def _name(p: Tensor, names: Mapping[int, str], key: str) -> str:
    if id(p) not in names:
        raise ValueError(
            f"{key}: a parameter of this optimizer, of shape {list(p.shape)}, is in none of the "
            "models that are given with it, and has no name without: add model=model"
        )
    return names[id(p)]


def _split(value: Any, name: str, tensors: Tensors, small: int = _SMALL) -> Any:
    """Moves the tensors of ``value`` to ``tensors``, and puts meta tensors in their place."""
    seen: set[str] = set()

    def leaf(x: Any, path: Path) -> Any:
        if isinstance(x, np.generic):  # as the learning rate of a schedule that calls NumPy
            return x.item()
        if not isinstance(x, Tensor):
            # the program may change the value while a thread writes it
            return copy.copy(x) if isinstance(x, (set, bytearray)) else x
        if isinstance(x, DistTensor):
            with torch.no_grad():  # a pending value is reduced
                x = resharded(x.detach(), spec_of_boxes(x.spec))
        elif x.numel() <= small:
            return x.detach().cpu().clone()
        full_name = _joined(name, path, seen)
        if full_name in tensors:
            raise ValueError(f"two entries of a checkpoint have the name {full_name}: rename one")
        tensors[full_name] = x.detach()
        return _meta(x.shape, x.dtype)

    return map_paths(value, leaf, dicts=_DICTS)


def _joined(name: str, path: Path, seen: set[str]) -> str:
    """Returns the name of a tensor, and adds it to ``seen``, the names so far. Two paths may have
    one name, as ``a.b`` and ``a``, ``b``: the second is numbered."""
    plain = full_name = ".".join(map(str, (name, *path)))
    count = 1
    while full_name in seen:
        count += 1
        full_name = f"{plain}~{count}"
    seen.add(full_name)
    return full_name


@lru_cache(maxsize=1024)
def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    with outside_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


def _fill(value: Any, name: str, tensors: Tensors, target: Target) -> Any:
    """Replaces each tensor by the result of ``target``, which will be read if the tensor is a meta
    tensor. The inverse of ``collect``."""
    seen: set[str] = set()

    def leaf(x: Any, path: Path) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = target(path, x)
        if x.is_meta:
            tensors[_joined(name, path, seen)] = made
        return made

    return map_paths(value, leaf)


def _with_defaults(value: Any, now: Any) -> Any:
    """Returns ``value`` with a defaultdict where ``now`` has one: files have dicts for them."""
    if isinstance(value, dict):
        items = {k: _with_defaults(v, _part(now, (k,))) for k, v in value.items()}
        is_default = type(now) is defaultdict
        return defaultdict(now.default_factory, items) if is_default else refill(value, items)
    if isinstance(value, (list, tuple)):
        return rebuild(value, [_with_defaults(v, _part(now, (i,))) for i, v in enumerate(value)])
    return value


def _plain(path: Path, saved: Tensor) -> Tensor:
    return torch.empty(saved.shape, dtype=saved.dtype) if saved.is_meta else saved


def _part(value: Any, path: Path) -> Any:
    """Returns the part of a structure at a path; None if there is none."""
    for key in path:
        if isinstance(value, Mapping) and key not in value:
            return None  # and a defaultdict gets no entry
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _like(now: Any) -> Target:
    """Makes new tensors, with the layouts that the tensors at the same paths of ``now`` have."""

    def make(path: Path, saved: Tensor) -> Tensor:
        found = _part(now, path)
        if not isinstance(found, DistTensor) or found.shape != saved.shape:
            return _plain(path, saved)
        if not saved.is_meta:
            return shard_tensor(saved, found.process_mesh, found.placements, check=False)
        spec = spec_of_boxes(found.spec)
        return empty(*saved.shape, mesh=spec.mesh, placements=spec.placements, dtype=saved.dtype)

    return make


def in_layout_of(state: Any, now: Any) -> Any:
    """Returns ``state`` with its tensors in the layouts of the tensors at the same paths of
    ``now``."""
    make = _like(now)
    return map_paths(state, lambda x, path: make(path, x) if isinstance(x, Tensor) else x)


def check_loadable(key: str, tree: Any) -> None:
    """Raises TypeError for a value that ``torch.load(weights_only=True)`` cannot load."""
    shell = _fill(tree, key, {}, lambda name, x: None)
    data = io.BytesIO()
    try:
        torch.save(shell, data)
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{key} holds a value that could not be loaded again: checkpoints are read with "
            f"weights_only, and have tensors, numbers, strings, lists and dicts. {error}"
        ) from None


def restore(
    key: str, x: Any, saved: Any, names: Mapping[int, str], tensors: Tensors
) -> Callable[[], Any]:
    """Adds the tensors to read for one object to ``tensors``, and changes no object. Call the
    result after they were read. Raises ValueError if the object does not match the saved one."""
    kind = "model" if isinstance(x, nn.Module) else saved["kind"]
    kind = "optimizer" if isinstance(x, Optimizer) else kind
    if kind != saved["kind"]:
        raise ValueError(
            f"{key} is a {type(x).__name__}, and the checkpoint has a {saved['kind']} of that name"
        )
    if kind == "model":
        return _restore_model(key, x, saved, tensors)
    if kind == "optimizer":
        return _restore_optimizer(key, x, saved, names, tensors)
    if kind == "object":
        now = x.state_dict()
        state = _with_defaults(_fill(saved["state"], key, tensors, _like(now)), now)
        return lambda: x.load_state_dict(state)
    value = saved["state"]
    if isinstance(x, Tensor):
        _check_tensor(key, x, value)
        if not value.is_meta:
            return lambda: x.detach().copy_(value)
        tensors[key] = x.detach()
        return x.detach
    reads: dict[int, tuple[Tensor, Tensor | None]] = {}
    value = _fill(value, key, tensors, _in_place(x, reads))
    if not isinstance(value, dict if isinstance(x, dict) else list):
        raise ValueError(
            f"{key} is a {type(x).__name__}, and was saved as a {type(value).__name__}"
        )

    def put() -> None:
        def filled(read: Any, path: Path) -> Any:
            target, copy_from = reads.get(id(read), (read, None))
            if copy_from is not None:
                with torch.no_grad():
                    target.copy_(copy_from)
            return target

        _refill(x, map_paths(value, filled))

    return put


def _in_place(now: Any, reads: dict[int, tuple[Tensor, Tensor | None]]) -> Target:
    """Chooses the memory of the tensors at the same paths of ``now``. ``reads``: id of a tensor
    that is read -> the tensor of ``now``, and what is copied to it if it is not read directly."""
    make = _like(now)

    def choose(path: Path, saved: Tensor) -> Tensor:
        old = _part(now, path)
        if not isinstance(old, Tensor) or (old.shape, old.dtype) != (saved.shape, saved.dtype):
            return make(path, saved)
        has_boxes = not isinstance(old, DistTensor) or spec_of_boxes(old.spec) is old.spec
        is_direct = saved.is_meta and has_boxes and not old.is_meta
        read = old.detach() if is_direct else make(path, saved)
        kept.append(read)
        reads[id(read)] = old, None if is_direct else read
        return read

    kept: list[Tensor] = []  # keeps the tensors alive whose ids are keys
    return choose


def _refill(old: Any, new: Any) -> Any:
    """Returns ``old`` with the contents of ``new`` if both are dicts or both are lists, else
    ``new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        items = {k: _refill(old.get(k), v) for k, v in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_refill(a, b) for a, b in zip_longest(old[: len(new)], new)]
        return old
    return new


def _restore_model(key: str, model: nn.Module, saved: Any, tensors: Tensors) -> Callable[[], Any]:
    now = model.state_dict(keep_vars=True)
    there = {**saved["state"], **{n: saved["state"][first] for n, first in saved["tied"].items()}}
    _check_names(key, "model", now, there)
    first = {id(value): name for name, value in reversed(now.items())}
    for name, value in now.items():
        is_free = name.split(".")[-1] == "_extra_state" and name not in saved["tied"]
        if not isinstance(value, Tensor) or (is_free and not _fits(value, there[name])):
            filled = _fill(there[name], f"{key}.{name}", tensors, _like(value))
            now[name] = _with_defaults(filled, value)
            continue
        _check_tensor(f"{key}.{name}", value, there[name])
        source, own = saved["tied"].get(name, name), first[id(value)]
        if own == name and source != name and first[id(now[source])] != name:
            raise ValueError(
                f"{key}.{name} shares its memory with {key}.{source} in the checkpoint, and does "
                "not in this model: tie them as the saved model did"
            )
        if own != name and saved["tied"].get(own, own) != source:
            raise ValueError(
                f"{key}.{name} shares its memory with {key}.{own} in this model, and the "
                "checkpoint has a value for each: do not tie them"
            )
        if own == name:
            tensors[f"{key}.{source}"] = value if isinstance(value, DistTensor) else value.detach()
    return lambda: model.load_state_dict(now)


def _restore_optimizer(
    key: str, x: Optimizer, saved: Any, names: Mapping[int, str], tensors: Tensors
) -> Callable[[], Any]:
    listed = [[_name(p, names, key) for p in group["params"]] for group in x.param_groups]
    group_of = {name: g for g, group in enumerate(saved["params"]) for name in group}
    _check_names(key, "optimizer", [n for group in listed for n in group], group_of)
    empty_groups = iter([g for g, group in enumerate(saved["params"]) if not group])
    chosen = [
        _group_of(key, group, group_of, saved["options"]) if group else next(empty_groups, None)
        for group in listed
    ]
    own = _fill(saved.get("own", {}), f"{key}.own", tensors, _like(_own_state(x)))
    options = _fill(saved["options"], f"{key}.options", tensors, _plain)
    state: dict[Any, Any] = {}
    as_state = like_state(x)
    for group, there in zip(x.param_groups, listed, strict=True):
        for p, name in zip(group["params"], there, strict=True):
            if name in saved["state"]:
                like = _state_like(as_state(p).detach(), x.state.get(p, {}))
                state[p] = _fill(saved["state"][name], f"{key}.state.{name}", tensors, like)

    def put() -> None:
        whole = x.state_dict()
        for group, i in zip(whole["param_groups"], chosen, strict=True):
            group.update({} if i is None else options[i])
        x.load_state_dict({**whole, **own.get("more", {}), "state": {}})
        x.state.update(own.get("state", {}))
        for group in x.param_groups:
            for p in group["params"]:
                if p not in state:
                    continue
                on_device = group.get("capturable") or group.get("fused")
                if on_device and isinstance(state[p].get("step"), Tensor):
                    state[p]["step"] = state[p]["step"].to(p.device)
                x.state[p] = state[p]

    return put


def _group_of(key: str, group: list[str], group_of: Any, options: list[Any]) -> int:
    """Returns the number of the saved group whose options ``group`` gets."""
    first: int = group_of[group[0]]
    for name in group:
        if options[group_of[name]] != options[first]:
            raise ValueError(
                f"{key}: {group[0]} and {name} are in one group here, and were saved in two with "
                "other options: make the groups as they were"
            )
    return first


def _state_like(p: Tensor, now: Mapping[str, Any]) -> Target:
    """Makes the state of parameter p, if it has none yet. State of the shape of p gets the layout
    of p."""

    def make(path: Path, saved: Tensor) -> Tensor:
        old = _part(now, path)
        if saved.is_meta and type(old) is type(p) and old.shape == saved.shape:
            fits = old.dtype is saved.dtype and not old.requires_grad
            if fits and (not isinstance(old, DistTensor) or spec_of_boxes(old.spec) is old.spec):
                return old
        alike = saved.shape == p.shape and path[-1:] != ("step",)
        if not isinstance(p, DistTensor) or (saved.numel() <= 1 and not alike):
            return _plain(path, saved).to("cpu" if saved.numel() <= 1 else p.device)
        if not saved.is_meta:
            return shard_tensor(saved, p.process_mesh, p.placements, check=False)
        if alike:
            return torch.empty_like(p, dtype=saved.dtype)
        return empty(*saved.shape, mesh=p.process_mesh, dtype=saved.dtype)

    return make


def _check_names(key: str, kind: str, here: Iterable[str], there: Iterable[str]) -> None:
    here, there = list(here), list(there)
    missing = [name for name in here if name not in set(there)]
    unexpected = [name for name in there if name not in set(here)]
    if missing or unexpected:
        close = close_to(missing[0], unexpected, 1) if missing else []
        parts = [
            f"{len(some)} {what}: {', '.join(some[:3])}{', ...' if len(some) > 3 else ''}"
            for some, what in (
                (missing, "parameters here that the checkpoint lacks"),
                (unexpected, "in the checkpoint that are not here"),
            )
            if some
        ]
        hint = f" (is {missing[0]} its {close[0]}?)" if close else ""
        raise ValueError(f"{key}: another {kind} was saved: {'; '.join(parts)}{hint}")


def _check_tensor(name: str, here: Tensor, there: Any) -> None:
    if not isinstance(there, Tensor):
        raise ValueError(f"{name} is a tensor, and the checkpoint has a {type(there).__name__}")
    if here.is_meta:
        raise ValueError(f"{name} is on the meta device: give it memory before load")
    if not _fits(here, there):
        raise ValueError(
            f"{name} is {here.dtype} of shape {list(here.shape)}, and the checkpoint has "
            f"{there.dtype} of shape {list(there.shape)}"
        )


def _fits(here: Any, there: Any) -> bool:
    """Returns True for two tensors of one shape and dtype."""
    both = isinstance(here, Tensor) and isinstance(there, Tensor)
    return both and (here.shape, here.dtype) == (there.shape, there.dtype)
