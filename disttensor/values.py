"""DistTensor as a Python value: numbers, lists, arrays, text, copies, pickles. The value is the global one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from disttensor import copies
from disttensor.cotangent import whole_grad
from disttensor.fallback import whole
from disttensor.layout import Layout
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from disttensor.tensor import DistTensor, resharded, wrap

Tensor = torch.Tensor


def full_tensor(self: DistTensor) -> Tensor:
    """The global tensor as a plain one, on every rank of the mesh: differentiable, a collective where it is split."""
    if self._copied:
        copies.check(self)
    return resharded(self, whole(self._spec))._local


def _full(self: DistTensor) -> Tensor:
    return full_tensor(self).detach() if not self._local.requires_grad else full_tensor(self)


def item(self: DistTensor) -> Any:
    return full_tensor(self).item()


def tolist(self: DistTensor) -> Any:
    return full_tensor(self).tolist()


def numpy(self: DistTensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    return full_tensor(self).numpy(force=force)


def __array__(
    self: DistTensor, dtype: Any = None, copy: bool | None = None
) -> np.ndarray[Any, Any]:
    full = full_tensor(self).numpy()
    return full if dtype is None else full.astype(dtype, copy=False)


def __bool__(self: DistTensor) -> bool:
    return bool(full_tensor(self))


def __int__(self: DistTensor) -> int:
    return int(full_tensor(self))


def __index__(self: DistTensor) -> int:
    return full_tensor(self).__index__()


def __float__(self: DistTensor) -> float:
    return float(full_tensor(self))


def __complex__(self: DistTensor) -> complex:
    return complex(full_tensor(self))


def __contains__(self: DistTensor, element: Any) -> bool:
    return bool((self == element).any())


def __iter__(self: DistTensor) -> Iterator[Any]:
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(torch.unbind(self, 0))


def __format__(self: DistTensor, spec: str) -> str:
    if self.ndim == 0 and not self._spec.layout.partial:
        return format(self._local.item(), spec)
    return format(item(self), spec) if self.ndim == 0 else object.__format__(self, spec)


def __repr__(self: DistTensor, *, tensor_contents: Any = None) -> str:
    """The spec first, then the piece of this rank. No communication."""
    where = self._spec.mesh
    rank = (
        "outside"
        if where.coordinate is None
        else f"rank {where.ranks[where.coordinates().index(where.coordinate)]}"
    )
    kind = "Parameter of DistTensor" if getattr(self, "_is_param", False) else "DistTensor"
    grad = ", requires_grad" if self._local.requires_grad else ""
    return f"{kind}({self._spec!r} on {where!r}{grad}; {rank}: {self._local.detach()!r})"


def __deepcopy__(self: DistTensor, memo: dict[int, Any]) -> DistTensor:
    if id(self) in memo:
        return memo[id(self)]
    if not self._local.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
        )
    local = (
        self._local.detach()
        .clone(memory_format=torch.preserve_format)
        .requires_grad_(self._local.requires_grad)
    )
    new = wrap(whole_grad(local, self._spec), self._spec)
    if getattr(self, "_is_param", False):
        new._is_param = True
    memo[id(self)] = new
    grad: Any = self.grad
    if grad is not None:
        new.grad = __deepcopy__(grad.detach(), memo)
    return new


def __reduce_ex__(self: DistTensor, protocol: Any) -> tuple[Any, ...]:
    spec = self._spec
    mesh = (spec.mesh.mesh.tolist(), spec.mesh.dim_names, spec.mesh.device_type)
    local = self._local.detach()
    if local.untyped_storage().nbytes() != local.nbytes:
        local = local.clone()
    flags = (self._local.requires_grad, bool(getattr(self, "_is_param", False)))
    return rebuild, (local, mesh, spec.layout.dims, spec.layout.partial, tuple(spec.shape), flags)


def rebuild(
    local: Tensor, mesh: Any, dims: Any, partial: Any, shape: Any, flags: tuple[bool, bool]
) -> DistTensor:
    """A DistTensor from what a pickle holds: this rank's piece and the spec."""
    layout = Layout(tuple(tuple(d) for d in dims), tuple((a, op) for a, op in partial))
    spec = DistSpec(ProcessMesh(*mesh), layout, shape, local.dtype)
    if tuple(local.shape) != tuple(spec.local_shape):
        raise RuntimeError(
            f"this pickle holds a piece of shape {list(local.shape)}, but rank's place in {spec!r} is {list(spec.local_shape)}: "
            "every rank loads what that rank has saved"
        )
    x = wrap(whole_grad(local.detach().requires_grad_(flags[0]), spec), spec)
    if flags[1]:
        x._is_param = True
    return x


torch.serialization.add_safe_globals([rebuild])
