"""Replicas of a tensor: broadcast from the first rank at start-up, and compared on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from disttensor.checks import check_sequence, check_type, has_own_operators
from disttensor.comm import collectives, objects
from disttensor.comm.groups import Group, world_group
from disttensor.core.layout import replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Replicate
from disttensor.core.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor, wrap

_FLAT = 1 << 28  # bytes of one broadcast: a larger one only needs more memory
_SHOWN = 20  # most tensors that an error names


def replicated_axes(spec: DistSpec) -> tuple[int, ...]:
    """Returns the mesh axes of more than one rank on which a tensor is replicated."""
    ends = enumerate(zip(spec.placements, spec.mesh.shape, strict=True))
    return tuple(a for a, (p, size) in ends if size > 1 and type(p) is Replicate)


def _shared(tensors: Iterable[Any]) -> Iterator[tuple[DistTensor, ProcessMesh, tuple[int, ...]]]:
    """Yields, once, each DistTensor of this rank that other ranks have copies of."""
    seen: set[int] = set()
    for x in tensors:
        if not isinstance(x, DistTensor) or id(x) in seen or not x.is_initialized:
            continue
        seen.add(id(x))
        spec = x.spec.on_root()
        axes = replicated_axes(spec)
        if axes and not x.local.is_meta:
            yield x, spec.mesh, axes


def replicas_of(value: Any, meshes: Sequence[ProcessMesh]) -> list[DistTensor]:
    """Returns ``value`` if it is a DistTensor; for a tensor subclass with its own operators, its
    inner tensors as DistTensors on the same memory, if there is one mesh."""
    if isinstance(value, DistTensor):
        return [value]
    if not has_own_operators(value) or len(meshes) != 1:
        return []
    found: list[DistTensor] = []
    for name in getattr(value, "__tensor_flatten__", lambda: ((), None))()[0]:
        part = getattr(value, name)
        if has_own_operators(part):
            found += replicas_of(part, meshes)
        elif isinstance(part, torch.Tensor):
            spec = DistSpec(meshes[0], replicated(part.ndim), part.shape, part.dtype)
            found.append(wrap(part, spec))
    return found


def broadcast_replicas(tensors: Iterable[DistTensor]) -> None:
    """Gives all replicas of each tensor the values of the first rank along the axes on which it is
    replicated, in place.

    All ranks of the meshes make the call, with the same tensors in the same order; ranks off the
    meshes do nothing. Tensors of one mesh with the same axes and dtype share a flat broadcast (of
    at most 256 MiB).
    """
    batches: dict[Any, list[list[DistTensor]]] = {}
    filled: dict[Any, int] = {}
    for x, mesh, axes in _shared(tensors):
        key = (mesh, axes, x.spec.dtype)
        size = filled.get(key, 0) + x.local.nbytes
        if key not in batches or size > _FLAT:
            batches.setdefault(key, []).append([])
            size = x.local.nbytes
        filled[key] = size
        batches[key][-1].append(x)
    with torch.no_grad():
        for (mesh, axes, _), parts in batches.items():
            for part in parts:
                _broadcast([x.local for x in part], mesh.group(axes))


def _broadcast(locals_: list[torch.Tensor], group: Group) -> None:
    flat = torch.cat([t.detach().reshape(-1) for t in locals_])
    if not flat.numel():
        return
    flat = collectives.broadcast(flat, 0, group)
    if group.index:
        pieces = flat.split([t.numel() for t in locals_])
        for t, piece in zip(locals_, pieces, strict=True):
            t.copy_(piece.view(t.shape))


def check_replicas(module_or_tensors: torch.nn.Module | Iterable[Any]) -> None:
    """Raises RuntimeError unless all replicas of each parameter and buffer are equal, bit for bit.

    Every rank of the world makes the call, with a module or with tensors. Digests are sent, not
    values. All ranks raise the same error, which names the parameters and the ranks. Regular
    tensors, and axes on which a tensor is split or pending, have no replicas.

    >>> model = dt.shard_module(torch.nn.Linear(4, 4), mesh)
    >>> dt.debugging.check_replicas(model)
    """
    found: list[tuple[str, str]] = []
    groups: dict[Any, dict[str, tuple[str, str]]] = {}
    named = dict(_named(module_or_tensors))
    names = {id(x): name for name, x in reversed(named.items())}
    for x, mesh, axes in _shared(named.values()):
        entry = (objects.digest(x.local), repr(x.spec))
        groups.setdefault((mesh, axes), {})[names[id(x)]] = entry
    for (mesh, axes), mine in groups.items():
        group = mesh.group(axes)
        found += _differences(objects.gather_objects(mine, group), group)
    everywhere = objects.gather_objects(found, world_group())
    lines = sorted({tuple(line) for ours in everywhere for line in ours})
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise RuntimeError(
            "check_replicas: replicas that should be equal are not:\n"
            + "\n".join(f"  {name} {what}" for name, what in lines[:_SHOWN])
            + more
            + "\nEither each rank drew its own start (dt.shard_data_parallel broadcasts from the "
            "first rank at start-up; or draw alike: dt.manual_seed with the same number on all "
            "ranks), or something has written to one replica only since."
        )


def _named(source: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(source, torch.nn.Module):
        yield from source.named_parameters()
        yield from source.named_buffers()
    else:
        tensors = check_sequence("check_replicas", source, "modules and lists of tensors")
        for x in tensors:
            check_type("check_replicas: entry", x, torch.Tensor, "a tensor")
        yield from ((f"tensors[{i}]", x) for i, x in enumerate(tensors))


def _differences(of_ranks: list[dict[str, tuple[str, str]]], group: Group) -> list[tuple[str, str]]:
    """Returns (name, difference) for each tensor that differs between members of ``group``."""
    out = []
    for name in dict.fromkeys(name for mine in of_ranks for name in mine):
        has = [mine.get(name) for mine in of_ranks]
        lacking = [r for r, entry in zip(group.ranks, has, strict=True) if entry is None]
        ours = next(entry for entry in has if entry is not None)
        other = [r for r, entry in zip(group.ranks, has, strict=True) if entry != has[0]]
        over = f"over {'+'.join(group.axes)}"
        if lacking:
            out.append((name, f"{ours[1]}: ranks {lacking} have no such tensor ({over})"))
        elif other:
            out.append(
                (name, f"{ours[1]}: ranks {other} differ from rank {group.ranks[0]} ({over})")
            )
    return out
