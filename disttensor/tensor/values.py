"""DistTensor as a Python value: numbers, lists, arrays, text, copies, pickles. The value is the
global one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from disttensor.autograd.grad_types import whole_grad
from disttensor.comm import collectives, objects
from disttensor.errors import user_line
from disttensor.layout import Layout
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from disttensor.switch import Switch
from disttensor.tensor import view_copies
from disttensor.tensor.dist_tensor import DistTensor, resharded, wrap

Tensor = torch.Tensor


def full_tensor(self: DistTensor, *, everywhere: bool = False) -> Tensor:
    """The global tensor as a plain one, on every rank of the mesh: differentiable, a collective
    where it is split.

    Ranks outside the mesh get a tensor of no elements; with ``everywhere`` they get the value too
    (not differentiable there), and every rank of the world must make the call.
    """
    if self._copied:
        view_copies.check(self)
    spec = self.spec
    full = resharded(self, spec.replicated()).local if self.is_initialized else None
    if everywhere:
        return objects.broadcast_value(
            full, spec.mesh.ranks, spec.mesh.device, spec.shape, spec.dtype
        )
    return self.to_local() if full is None else full


class values_everywhere:
    """``with values_everywhere():`` numbers that Python asks for (``item``, ``bool``, ``tolist``,
    ``numpy``) reach ranks outside the mesh of the tensor too: its ranks send them. Every rank of
    the world must run the block.

    >>> with dt.values_everywhere():
    ...     dt.ones(2, mesh=mesh).sum().item()
    2.0
    """

    level = Switch("values_everywhere")

    def __enter__(self) -> values_everywhere:
        self.level.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.level.__exit__()


def broadcast_value(x: Any) -> Tensor:
    """The value of ``x`` as a plain tensor on every rank of the world, outside its mesh too. Every
    rank must make the call.

    >>> dt.broadcast_value(dt.ones(2, mesh=mesh).sum()).item()
    2.0
    """
    if not isinstance(x, DistTensor):
        return x
    whole_value: Any = x.detach()
    return full_tensor(whole_value, everywhere=True)


def _value(self: DistTensor) -> Tensor:
    """The global value, for Python. Raises RuntimeError on a rank that has no part of it."""
    if values_everywhere.level:
        return full_tensor(self, everywhere=True)
    if not self.is_initialized:
        raise RuntimeError(
            f"the value of {self.spec!r} is asked for at {user_line()} on rank "
            f"{collectives.world()[0]}, which is not in its {self.spec.mesh!r} and holds metadata "
            "only. On every rank: dt.broadcast_value(x), or with dt.values_everywhere(): around "
            "the code that asks"
        )
    return full_tensor(self)


def item(self: DistTensor) -> Any:
    return _value(self).item()


def tolist(self: DistTensor) -> Any:
    return _value(self).tolist()


def numpy(self: DistTensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    return _value(self).numpy(force=force)


def __array__(
    self: DistTensor, dtype: Any = None, copy: bool | None = None
) -> np.ndarray[Any, Any]:
    full = _value(self).numpy()
    return full if dtype is None else full.astype(dtype, copy=False)


def __bool__(self: DistTensor) -> bool:
    return bool(_value(self))


def __int__(self: DistTensor) -> int:
    return int(_value(self))


def __index__(self: DistTensor) -> int:
    return _value(self).__index__()


def __float__(self: DistTensor) -> float:
    return float(_value(self))


def __complex__(self: DistTensor) -> complex:
    return complex(_value(self))


def __contains__(self: DistTensor, element: Any) -> bool:
    return bool((self == element).any())


def __iter__(self: DistTensor) -> Iterator[Any]:
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(torch.unbind(self, 0))


def __format__(self: DistTensor, spec: str) -> str:
    if (
        self.ndim == 0
        and not self.spec.layout.partial
        and self.is_initialized
        and not values_everywhere.level
    ):
        return format(self.local.item(), spec)
    return format(item(self), spec) if self.ndim == 0 else object.__format__(self, spec)


def __repr__(self: DistTensor, *, tensor_contents: Any = None) -> str:
    """The spec first, then the piece of this rank. No communication."""
    where = self.spec.mesh
    rank = f"rank {collectives.world()[0]}"
    kind = "Parameter of DistTensor" if getattr(self, "_is_param", False) else "DistTensor"
    grad = ", requires_grad" if self.local.requires_grad else ""
    piece = (
        f"{rank}: {self.local.detach()!r}"
        if self.is_initialized
        else "this rank is outside: no data"
    )
    return f"{kind}({self.spec!r} on {where!r}{grad}; {piece})"


def __deepcopy__(self: DistTensor, memo: dict[int, Any]) -> DistTensor:
    if id(self) in memo:
        return memo[id(self)]
    if not self.local.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol"
        )
    local = (
        self.local.detach()
        .clone(memory_format=torch.preserve_format)
        .requires_grad_(self.local.requires_grad)
    )
    new = wrap(whole_grad(local, self.spec), self.spec)
    if getattr(self, "_is_param", False):
        new._is_param = True
    memo[id(self)] = new
    grad: Any = self.grad
    if grad is not None:
        new.grad = __deepcopy__(
            grad.detach(), {}
        )  # not in memo: what detach gave is gone soon, and its id is another tensor's
    return new


def __reduce_ex__(self: DistTensor, protocol: Any) -> tuple[Any, ...]:
    spec = self.spec
    mesh = (spec.mesh.mesh.tolist(), spec.mesh.dim_names, spec.mesh.device_type)
    local = self.local.detach()
    if local.untyped_storage().nbytes() != local.nbytes:
        local = local.clone()
    flags = (self.local.requires_grad, bool(getattr(self, "_is_param", False)))
    return rebuild, (local, mesh, spec.layout.dims, spec.layout.partial, tuple(spec.shape), flags)


def rebuild(
    local: Tensor, mesh: Any, dims: Any, partial: Any, shape: Any, flags: tuple[bool, bool]
) -> DistTensor:
    """A DistTensor from what a pickle holds: this rank's piece and the spec."""
    layout = Layout(tuple(tuple(d) for d in dims), tuple((a, op) for a, op in partial))
    spec = DistSpec(ProcessMesh(*mesh), layout, shape, local.dtype)
    if tuple(local.shape) != tuple(spec.local_shape):
        raise RuntimeError(
            f"this pickle holds a piece of shape {list(local.shape)}, but rank's place in {spec!r} "
            f"is {list(spec.local_shape)}: every rank loads what that rank has saved"
        )
    x = wrap(whole_grad(local.detach().requires_grad_(flags[0]), spec), spec)
    if flags[1]:
        x._is_param = True
    return x


torch.serialization.add_safe_globals([rebuild])
