"""Gradient clipping by one norm over all parameters, whatever their layouts and meshes.

``torch.nn.utils.clip_grad_norm_`` comes here when DistTensors are among the parameters. Each mesh knows the norm of its
gradients; the world then puts the meshes together, each counted once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.nn.utils import clip_grad as torchs

from disttensor import comm
from disttensor.mesh import ProcessMesh
from disttensor.sync import sync_gradients
from disttensor.tensor import DistTensor
from disttensor.values import full_tensor

Tensor = torch.Tensor
Parameters = Tensor | Iterable[Tensor]

_clip_norm: Callable[..., Any] = torchs.clip_grad_norm_
_total_norm: Callable[..., Any] = torchs._get_total_norm


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:  # fmt: skip
    """Scale the gradients down so that their norm, taken over all parameters of all meshes, is at most ``max_norm``.

    Every rank of the world makes the call, with the same parameters. Gives the norm before clipping, a plain tensor that is
    the same on all ranks. Pending gradients are reduced first; a replicated one counts once; plain tensors count as
    replicated. Raises RuntimeError for a norm that is not finite if ``error_if_nonfinite``.

    >>> w = dt.ones(4, mesh=mesh, requires_grad=True)
    >>> (w * 3).sum().backward()
    >>> dt.clip_grad_norm_([w], max_norm=1.0)
    tensor(6.)
    >>> round(w.grad.square().sum().item(), 3)
    1.0
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shares = by_mesh(params)
    meshes = [mesh for mesh in shares if mesh is not None]
    if len(shares) <= 1 and everywhere(meshes):
        if meshes and foreach is False:
            sync_gradients(params)  # one collective, not one for each
        return _plain(_clip_norm(params, max_norm, norm_type, error_if_nonfinite, foreach))
    sync_gradients(params)
    norms = [_norm_on(mesh, share, norm_type, foreach) for mesh, share in shares.items()]
    total = _together(shares, norms, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} over {len(params)} parameters on {len(meshes)} meshes is {total.item()}, "
            "so the gradients cannot be clipped. To scale them by it anyway: error_if_nonfinite=False"
        )
    for share in shares.values():
        torchs._clip_grads_with_norm_(share, max_norm, total, foreach)
    return total


def by_mesh(params: Iterable[Tensor]) -> dict[ProcessMesh | None, list[Tensor]]:
    """The parameters of each mesh, in the order of all; None: plain tensors."""
    shares: dict[ProcessMesh | None, list[Tensor]] = {}
    for p in params:
        shares.setdefault(p._spec.mesh if isinstance(p, DistTensor) else None, []).append(p)
    return shares


def everywhere(meshes: Iterable[ProcessMesh]) -> bool:
    """Is every rank of the world in each of them?"""
    size = comm.world()[1]
    return all(mesh.size == size for mesh in meshes)


def _plain(norm: Any) -> Any:
    return full_tensor(norm) if isinstance(norm, DistTensor) else norm


def over_world(x: Tensor, op: str) -> Tensor:
    return comm.all_reduce(x, op, comm.new_group(range(comm.world()[1]), ("world",)))


def _norm_on(
    mesh: ProcessMesh | None, params: Sequence[Tensor], norm_type: float, foreach: bool | None
) -> Tensor | None:
    """The norm of the gradients of these parameters of one mesh; None without any, or outside."""
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return None
    return _plain(_total_norm(grads, norm_type, False, foreach))


def _together(
    shares: dict[ProcessMesh | None, list[Tensor]], norms: Sequence[Tensor | None], order: float
) -> Tensor:
    """The norm over all meshes, each of which its first rank brings in."""
    rank, size = comm.world()
    meshes = [mesh for mesh in shares if mesh is not None]
    device = meshes[0].device
    shared = not everywhere(meshes) or None in shares
    found = torch.zeros(2, len(norms), dtype=torch.float64)  # norms; how many ranks have one
    for i, (mesh, norm) in enumerate(zip(shares, norms, strict=True)):
        if norm is not None:
            found[1, i] = 1.0
            if not shared or rank == (0 if mesh is None else mesh.ranks[0]):
                found[0, i] = float(norm)
    if shared:
        found = over_world(found.to(device), "sum").cpu()
    dtypes: list[torch.dtype] = []
    for i, (mesh, share) in enumerate(shares.items()):
        have, full = int(found[1, i]), size if mesh is None else mesh.size
        if shared and have not in (0, full):
            where = "plain tensors" if mesh is None else f"{len(share)} parameters on {mesh!r}"
            raise RuntimeError(
                f"clip_grad_norm_: of {where}, {have} ranks of {full} have a gradient, so the norm would depend on the rank. Every "
                "rank runs the same program; a plain tensor counts as replicated, or make it a DistTensor: shard_tensor(x, mesh)"
            )
        if have:
            dtypes += [p.dtype.to_real() for p in share]
    if not dtypes:
        return torch.tensor(0.0, device=device)
    here = found[0][found[1] > 0]
    total = here.sum() if order == 0 else torch.linalg.vector_norm(here, order)
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return total.to(device, dtype)


# torch's own names --------------------------------------------------------------------------------------


@wraps(_clip_norm)
def _either(parameters: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(parameters, types.GeneratorType):
        params = list(parameters)
        parameters = params or iter_of_none()  # torch warns of a generator of nothing
    elif isinstance(parameters, Tensor):
        params = [parameters]
    else:
        params = parameters = list(parameters)
    ours = any(isinstance(p, DistTensor) for p in params)
    return (clip_grad_norm_ if ours else _clip_norm)(parameters, *args, **kwargs)


def iter_of_none() -> Generator[Any, None, None]:
    yield from ()


@wraps(_total_norm)
def _total_on_world(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm of tensors that lie on one mesh is that on all ranks only if all ranks are in it."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for t in tensors:
        if isinstance(t, DistTensor) and not everywhere([t._spec.mesh]):
            raise RuntimeError(
                f"get_total_norm: a tensor on {t._spec.mesh!r}, which is not the whole world of {comm.world()[1]} ranks: the norm "
                "would be that of one mesh, and unknown elsewhere. Give the parameters to dt.clip_grad_norm_(params, max_norm) or "
                "torch.nn.utils.clip_grad_norm_ (looked up after disttensor was imported), which put all meshes together"
            )
    return _total_norm(tensors, *args, **kwargs)


def _each_mesh(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func(parameters, ...)`` for the parameters of each mesh on its own."""

    @wraps(func)
    def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        shares = by_mesh(params)
        if not shares.keys() - {None}:
            return func(params, *args, **kwargs)
        for share in shares.values():
            if any(p.grad is not None for p in share):
                func(share, *args, **kwargs)
        return None

    return run


_NEW: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": _either,
    "_get_total_norm": _total_on_world,
    "get_total_norm": _total_on_world,
    "_clip_grads_with_norm_": _each_mesh(torchs._clip_grads_with_norm_),
    "clip_grads_with_norm_": _each_mesh(torchs._clip_grads_with_norm_),
    "clip_grad_value_": _each_mesh(torchs.clip_grad_value_),
}
for _module in (torchs, torch.nn.utils):
    for _name, _new in _NEW.items():
        if hasattr(_module, _name):
            setattr(_module, _name, _new)
