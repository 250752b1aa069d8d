"""Gradient clipping by one norm over all parameters, whatever their layouts and meshes.

``torch.nn.utils.clip_grad_norm_`` calls this module if DistTensors are among the parameters. Each
piece of a gradient is counted by one of the ranks that hold it, and one small reduction puts the
pieces, parameters and meshes together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from disttensor.checks import argument_error, check_bool, check_number
from disttensor.comm import collectives, objects
from disttensor.comm.buffers import constants
from disttensor.comm.groups import Group, world_group
from disttensor.comm.process_group import world
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.gradients.sync import sync_gradients, tensors_of
from disttensor.optim.step_hooks import check_fresh
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor
Parameters = Tensor | Iterable[Tensor]
Shares = dict[ProcessMesh | None, list[Tensor]]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # fmt: skip
    """Scales the gradients so that their norm, over all parameters of all meshes, is at most
    ``max_norm``.

    Every rank of the world makes the call, with the same parameters. Returns the norm before
    clipping, a regular tensor that is the same on all ranks (its ``full_tensor()`` returns itself,
    for code that expects a DTensor). Sends one all-reduce of a few numbers over the axes that split
    gradients. Pending gradients are reduced first; a replicated one counts once; regular tensors
    count as replicated. Raises RuntimeError for a norm that is not finite if
    ``error_if_nonfinite``, before anything is scaled.

    >>> w = dt.ones(4, mesh=mesh, requires_grad=True)
    >>> (w * 3).sum().backward()
    >>> dt.clip_grad_norm_([w], max_norm=1.0)
    tensor(6.)
    >>> round(w.grad.square().sum().item(), 3)
    1.0
    """
    params = list(tensors_of(parameters, "clip_grad_norm_: parameters"))
    if not all(isinstance(p, Tensor) for p in params):
        raise argument_error("clip_grad_norm_: parameters", parameters, "an iterable of tensors")
    check_number("clip_grad_norm_: max_norm", max_norm)
    check_number("clip_grad_norm_: norm_type", norm_type)
    check_bool("clip_grad_norm_: error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_bool("clip_grad_norm_: foreach", foreach)
    check_fresh(params, "clip_grad_norm_")
    sync_gradients(params)
    shares = by_mesh(params)
    if not shares.keys() - {None}:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    total = _norm(shares, float(norm_type), foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} over {len(params)} parameters on "
            f"{len(shares.keys() - {None})} meshes is {total.item()}, so the gradients cannot be "
            "clipped. To scale them by it anyway: error_if_nonfinite=False"
        )
    nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
    same = total.detach()  # with the methods of ``total``, it would refer to itself
    total.full_tensor = same.detach  # type: ignore[attr-defined]
    total.__reduce_ex__ = same.__reduce_ex__  # type: ignore[method-assign]  # without attributes
    return total


# Which ranks hold which gradients -----------------------------------------------------------------


def by_mesh(params: Iterable[Tensor]) -> Shares:
    """Returns the parameters of each mesh, in their order; None: regular tensors. Parameters of a
    sub-mesh count to its root, and are replicated on the other axes."""
    shares: Shares = {}
    for p in params:
        shares.setdefault(p.spec.mesh.root if isinstance(p, DistTensor) else None, []).append(p)
    return shares


def all_ranks_in(meshes: Iterable[ProcessMesh]) -> bool:
    """Returns True if every rank of the world is in each mesh."""
    size = world()[1]
    return all(mesh.root.size == size for mesh in meshes)


def splitting_axes(mesh: ProcessMesh, params: Iterable[Tensor]) -> Axes:
    """Returns the axes of ``mesh`` that split some of these parameters, or their gradients."""
    found: set[int] = set()
    for p in params:
        for x in (p, p.grad):
            if isinstance(x, DistTensor):
                found |= x.spec.on_root().layout.sharded
    return tuple(a for a in sorted(found) if mesh.shape[a] > 1)


def group_of_norm(shares: Shares) -> Group | None:
    """Returns the group of ranks that must exchange numbers to compute the global norm; None if
    each rank has all numbers."""
    meshes = [mesh for mesh in shares if mesh is not None]
    if not all_ranks_in(meshes) or None in shares:
        return world_group()
    split = {mesh: splitting_axes(mesh, shares[mesh]) for mesh in meshes}
    if not any(split.values()):
        return None
    mesh = meshes[0]
    # Rows of a mesh in another order might add up in different orders.
    if len(meshes) == 1 and mesh.ranks == tuple(sorted(mesh.ranks)):
        return mesh.group(split[mesh])
    return world_group()


def is_first_holder(mesh: ProcessMesh, split: frozenset[int], among: Sequence[int]) -> bool:
    """Returns True if this rank is the first ``among`` the ranks that hold the same piece of a
    tensor ``split`` by these axes."""
    alike = [a for a in range(mesh.ndim) if a not in split]
    ranks = mesh.mesh
    holders = (int(ranks[c]) for c in mesh.members(alike, mesh.coordinate or ()))
    return world()[0] == next(r for r in holders if r in among)


# The norm -----------------------------------------------------------------------------------------


def _norm(shares: Shares, order: float, foreach: bool | None) -> Tensor:
    """Returns the norm of all gradients, computed as in torch: the norm of the norms of each."""
    group = group_of_norm(shares)
    meshes = [mesh for mesh in shares if mesh is not None]
    device = meshes[0].device
    pieces, number, flags = _own_pieces(shares, group)
    count = sum(map(len, shares.values()))
    norms, number = _norms(pieces, number, order, foreach, device)
    found = _number(norms, number, order, count)
    if group is not None:
        largest, mark = math.isinf(order), _mark(meshes)
        mine = [*flags, mark, -mark if largest else mark**2]
        others = constants(tuple(mine), found.dtype, device)
        found = collectives.all_reduce(
            torch.cat([found, others]), "max" if largest else "sum", group
        )
        found, others = found.split([len(found) - len(mine), len(mine)])
        if None in shares or not all_ranks_in(meshes):  # else each rank knows
            n = 1 if largest else group.size
            *flags, one, other = objects.received_numbers(
                others, [*flags, *(n * m for m in mine[-2:])]
            )
            _check_alike(one + other == 0 if largest else one**2 == n * other, meshes)
    dtype = _dtype(shares, flags)
    return _total(found, order).to(dtype) if dtype else torch.tensor(0.0, device=device)


def _mark(meshes: Sequence[ProcessMesh]) -> int:
    """Returns a small number that identifies these meshes, the same on every rank."""
    return zlib.crc32(repr([(m.ranks, m.shape) for m in meshes]).encode()) % 2**16


def _check_alike(alike: bool, meshes: Sequence[ProcessMesh]) -> None:
    """Raises an error on all ranks if ``_mark`` differs between them."""
    if not alike:
        raise RuntimeError(
            f"clip_grad_norm_: the ranks give parameters of different meshes; rank "
            f"{world()[0]} gives parameters on {', '.join(map(repr, meshes))}. The "
            "norm is unknown, because these may be the same parameters. Give all parameters on "
            "every rank, also of other stages; for parameters on a part of the ranks use a "
            'sub-mesh, as mesh["tp"], of the mesh of all ranks'
        )


def _own_pieces(shares: Shares, group: Group | None) -> tuple[list[Tensor], list[int], list[float]]:
    """Returns the pieces that this rank contributes, and the numbers of their parameters; for each
    mesh (some rank has gradients, some rank has none)."""
    pieces: list[Tensor] = []
    number: list[int] = []
    flags: list[float] = []
    among = (world()[0],) if group is None else group.ranks
    first = 0
    for mesh, share in shares.items():
        held: dict[int, Any] = {i: p.grad for i, p in enumerate(share, first) if p.grad is not None}
        first += len(share)
        # by the axes that split a piece
        bring: dict[Any, bool] = {None: world()[0] == among[0]}
        for i, g in held.items():
            local, split = (g, None) if mesh is None else (g.local, g.spec.on_root().layout.sharded)
            if mesh is not None and split is not None and split not in bring:
                bring[split] = is_first_holder(mesh, split, among)
            if bring[split]:
                pieces.append(local)
                number.append(i)
        inside = mesh is None or mesh.coordinate is not None
        flags += [float(inside and bool(held)), float(inside and not held)]
    return pieces, number, flags


def _norms(
    pieces: Sequence[Tensor], number: Sequence[int], order: float, foreach: bool | None,
    device: torch.device,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Returns the norms of the nonempty pieces, in float32 or wider, and their parameters."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(pieces):
        if x.numel():
            alike.setdefault((x.dtype, x.device), []).append(i)
    found = [torch.zeros(0, dtype=torch.float64, device=device)]
    for (dtype, _), members in alike.items():
        wide = torch.float32 if dtype.itemsize < 4 else None  # squares of small floats overflow
        some = [pieces[i].detach() for i in members]
        if foreach is False:
            norms: Any = [torch.linalg.vector_norm(x, order, dtype=wide) for x in some]
        else:
            norms = torch._foreach_norm(some, order, dtype=wide)
        found.append(torch.stack(norms).to(device, torch.float64))
    return torch.cat(found), [number[i] for members in alike.values() for i in members]


def _number(values: Tensor, number: Sequence[int], order: float, count: int) -> Tensor:
    """Converts norms of pieces to numbers whose sum or maximum over ranks gives the global norm.

    For a finite order: the sum of powers. For order 0: the number of nonzero elements of each of
    ``count`` parameters. For an infinite order: the largest (or minus the smallest), and whether
    any is nan, because the maximum of a backend may drop nan."""
    if order == 0:
        out = values.new_zeros(count)
        return out.index_add_(0, constants(tuple(number), torch.long, values.device), values)
    if not math.isinf(order):
        return (values**order).sum().reshape(1)
    lost = values.isnan()
    values = torch.where(lost, -math.inf, values if order > 0 else -values)
    edge = values.new_full((1,), -math.inf)
    return torch.stack([torch.cat([values, edge]).amax(), lost.any().to(values.dtype)])


def _total(numbers: Tensor, order: float) -> Tensor:
    """Returns the norm, computed from the numbers of all ranks."""
    if order == 0:
        return (numbers != 0).sum()
    if not math.isinf(order):
        return numbers[0] ** (1 / order)
    largest, lost = numbers
    return torch.where(lost != 0, math.nan, largest.clamp(min=0) if order > 0 else -largest)


def _dtype(shares: Shares, flags: Sequence[float]) -> torch.dtype | None:
    """Returns the dtype of the norm; None without gradients. Raises an error if only some ranks of
    a mesh have gradients."""
    found: torch.dtype | None = None
    for i, (mesh, share) in enumerate(shares.items()):
        some, none = flags[2 * i : 2 * i + 2]
        if some and none:
            where = "regular tensors" if mesh is None else f"{len(share)} parameters on {mesh!r}"
            raise RuntimeError(
                f"clip_grad_norm_: of {where}, some ranks have gradients and others none, so the "
                "norm would depend on the rank. Every rank runs the same program; a regular tensor "
                "counts as replicated, or make it a DistTensor: shard_tensor(x, mesh)"
            )
        for p in ([p for p in share if p.requires_grad] or share) if some else ():
            dtype = p.dtype.to_real()
            found = dtype if found is None else torch.promote_types(found, dtype)
    return found
