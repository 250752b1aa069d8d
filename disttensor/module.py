"""shard_module: the parameters and buffers of an ordinary module become DistTensors, by a plan of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from disttensor.api import need_member, shard_tensor
from disttensor.layout import layout_of, replicated
from disttensor.mesh import ProcessMesh
from disttensor.placement import Placement
from disttensor.spec import DistSpec
from disttensor.tensor import DistTensor, wrap

Plan = Mapping[Any, Sequence[Placement]] | Callable[[str, nn.Module, ProcessMesh], None] | None


def shard_module(module: nn.Module, mesh: ProcessMesh, plan: Plan = None) -> nn.Module:
    """Make every parameter and buffer of ``module`` a DistTensor on ``mesh``, in place; gives the module back.

    ``plan`` maps names of parameters or of modules (exact, a glob as ``"*.attn.[qkv].weight"``, or a compiled regex) to
    placements; the first entry that matches counts, exact names before patterns. Or it is a function (name, module, mesh)
    that is called for each submodule and shards what it likes with ``shard_tensor``. What is not named is replicated.
    Tied parameters stay tied. Parameters on the meta device are made shard by shard and initialized by
    ``reset_parameters`` of their modules, with the bits that one process draws.
    Raises ValueError for a name that matches nothing, before anything is changed.
    """
    need_member(mesh, "shard_module")
    chosen = _choose(module, mesh, plan) if not callable(plan) else {}
    if callable(plan):
        for name, child in module.named_modules():
            plan(name, child, mesh)
    made: dict[int, Any] = {}
    fresh: list[nn.Module] = []
    for prefix, child in module.named_modules():
        born = False
        for table in (child._parameters, child._buffers):
            for key, value in table.items():
                if value is None or isinstance(value, DistTensor):
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if id(value) not in made:
                    made[id(value)] = (value, _place(value, mesh, chosen.get(name)))
                    born = born or value.is_meta
                table[key] = made[id(value)][1]
        if born:
            fresh.append(child)
    for child in fresh:
        if callable(getattr(child, "reset_parameters", None)):
            child.reset_parameters()  # type: ignore[operator]
    return module


def _place(value: torch.Tensor, mesh: ProcessMesh, placements: Sequence[Placement] | None) -> Any:
    layout = replicated(value.ndim) if placements is None else layout_of(placements, value.ndim, mesh.ndim)
    spec = DistSpec(mesh, layout, value.shape, value.dtype)
    if value.is_meta:
        local = torch.empty(spec.local_shape, dtype=value.dtype, device=mesh.device)
        out: Any = wrap(local.requires_grad_(value.requires_grad), spec)
    else:
        out = shard_tensor(value.detach(), mesh, spec.placements, requires_grad=value.requires_grad)
    if isinstance(value, nn.Parameter):
        out._is_param = True
    return out


def _choose(module: nn.Module, mesh: ProcessMesh, plan: Mapping[Any, Sequence[Placement]] | None) -> dict[str, Sequence[Placement]]:
    """name of each tensor -> placements. Checks the whole plan."""
    tensors = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    modules = {name for name, _ in module.named_modules()}
    chosen: dict[str, Sequence[Placement]] = {}
    for exact in (True, False):
        for pattern, placements in (plan or {}).items():
            literal = isinstance(pattern, str) and (pattern in tensors or pattern in modules)
            if literal is not exact:
                continue
            hits = [name for name in tensors if _matches(pattern, name, modules)]
            if not hits:
                close = ", ".join(list(tensors)[:8])
                raise ValueError(f"shard_module: {pattern!r} matches no parameter, buffer or module; there are {close}, ...")
            for name in hits:
                if name not in chosen:
                    try:
                        layout_of(placements, tensors[name].ndim, mesh.ndim)
                    except ValueError as error:
                        raise ValueError(f"shard_module: plan entry {pattern!r} for {name!r}: {error}") from None
                    chosen[name] = placements
    by_tensor: dict[int, str] = {}
    for name, value in tensors.items():  # a tied parameter has one layout under all its names
        first = by_tensor.setdefault(id(value), name)
        if first != name:
            one, other = chosen.get(first), chosen.get(name)
            if one is not None and other is not None and tuple(one) != tuple(other):
                raise ValueError(f"shard_module: {first!r} and {name!r} are one tied tensor, but the plan places them differently")
            if one is None and other is not None:
                chosen[first] = other
    return chosen


def _matches(pattern: Any, name: str, modules: set[str]) -> bool:
    owners = [name]
    while "." in owners[-1]:
        owners.append(owners[-1].rsplit(".", 1)[0])
    if isinstance(pattern, re.Pattern):
        return any(pattern.fullmatch(o) for o in owners)
    if pattern in modules and pattern:
        return name == pattern or name.startswith(pattern + ".")
    return any(o == pattern or fnmatchcase(o, pattern) for o in owners)


