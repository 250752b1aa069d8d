"""DistTensor as a Python value: its local, numbers, lists, arrays, text."""

# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from disttensor.autograd.grad_types import GradType, gradient_type
from disttensor.checks import check_bool, check_sequence
from disttensor.comm import objects
from disttensor.comm.compare_reads import compare_read
from disttensor.comm.process_group import world
from disttensor.core.layout import Axes, layout_of
from disttensor.core.spec import DistSpec
from disttensor.errors import user_line
from disttensor.settings import Setting
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.reshard import resharded
from disttensor.torch_private import has_data, storage_id

Tensor = torch.Tensor


class values_everywhere(Setting, default=False):
    """``with values_everywhere():`` makes ``item``, ``bool``, ``tolist``, ``numpy`` and the like
    return the value on ranks off the mesh of the tensor too, and write it to regular tensors there
    (``regular.copy_(x)``). The ranks of the mesh send it. Every rank of the world must run the
    block.

    >>> with dt.values_everywhere():
    ...     dt.ones(2, mesh=mesh).sum().item()
    2.0
    """

    def __init__(self) -> None:
        super().__init__(True)


def broadcast_value(x: Any) -> Tensor:
    """Returns the value of ``x`` as a regular tensor on every rank of the world, also off its mesh.
    Every rank must make the call.

    >>> dt.broadcast_value(dt.ones(2, mesh=mesh).sum()).item()
    2.0
    """
    return full_tensor(x.detach(), everywhere=True) if isinstance(x, MeshTensor) else x


def full_tensor(x: Any, *, everywhere: bool = False) -> Tensor:
    """Implements ``Values.full_tensor``."""
    if x._view_state is not None:
        views.check(x)
    spec = x.spec
    if x.is_initialized and spec.varies and x.local.is_cpu:
        _compare_read(x)
    full = resharded(x, spec.replicated()).local if x.is_initialized else None
    if everywhere:
        return objects.broadcast_value(
            full, spec.mesh.root.ranks, spec.mesh.device, spec.shape, spec.dtype
        )
    return x.to_local() if full is None else full


def _value(x: MeshTensor) -> Tensor:
    """Returns the global value. Raises RuntimeError on a rank that has no part of it."""
    if values_everywhere.current():
        return full_tensor(x, everywhere=True)
    if not x.is_initialized:
        raise RuntimeError(
            f"the value of {x.spec!r} is read at {user_line()} on rank {world()[0]}, "
            f"which is not in its {x.spec.mesh!r} and holds metadata only. On every rank: "
            "dt.broadcast_value(x), or with dt.values_everywhere(): around the code that reads it"
        )
    if x.spec.varies and not x.local.is_cpu:  # full_tensor waits for no accelerator
        _compare_read(x)
    return full_tensor(x)


def _compare_read(x: MeshTensor) -> None:
    """Compares this read with those of the ranks that it communicates with; not while a program is
    traced."""
    if has_data(x.local):
        compare_read(x.spec)


def axes_of_grad(who: str, spec: DistSpec, grad_placements: Any) -> Axes:
    """Returns the axes over which a use varies if its gradient has these placements. Raises
    ValueError for placements that no use has."""
    grads = layout_of(grad_placements, spec.ndim, spec.mesh.ndim)
    axes = tuple(a for a, op in grads.partial if op == "sum" and a not in spec.varies)
    if gradient_type(GradType(spec, axes))[0].spec.layout != grads:
        raise ValueError(
            f"{who}: grad_placements={list(grad_placements)} of {spec!r}: a gradient has Shard for "
            "Shard, Replicate for Partial, and Replicate or Partial('sum') for Replicate. "
            "Redistribute the tensor first"
        )
    return axes


class Values(MeshTensor):
    def to_local(self, *, grad_axes: Any = (), grad_placements: Any = None) -> Tensor:
        """Returns this rank's piece, a regular tensor in the local autograd graph; of size 0 on a
        rank off the mesh.

        ``grad_axes``: mesh axes (names or numbers) on which the code that follows treats a
        replicated value differently on each rank, so that its gradient is a contribution to be
        summed. ``grad_placements``: the same as in torch's DTensor, the placements of the gradient.
        Allowed are Shard for Shard, Replicate for Partial, and Replicate or Partial("sum") for
        Replicate; others raise ValueError.
        """
        if grad_placements is not None:
            if grad_axes:
                raise ValueError("to_local: grad_axes and grad_placements are given: give one")
            grad_axes = axes_of_grad("to_local", self.spec, grad_placements)
        given = (grad_axes,) if isinstance(grad_axes, (str, int)) else grad_axes
        listed = check_sequence("to_local: grad_axes", given, "axes of the mesh")
        axes = tuple(sorted(self.spec.mesh.axis(a) for a in listed))
        if self._view_state is not None:
            views.check(self)
        if not self.is_initialized:
            return self.local.to(self.spec.dtype)
        views.mark_given_out(self)
        return self.local_for(axes)

    def full_tensor(self, *, everywhere: bool = False, grad_placements: Any = None) -> Tensor:
        """Returns the global tensor as a regular one on every rank of the mesh: differentiable, a
        collective if it is split.

        Ranks off the mesh get a tensor without elements. With ``everywhere`` they get the value too
        (not differentiable there), and every rank of the world must make the call.
        ``grad_placements``: as in ``to_local``, of the replicated value; not with ``everywhere``.
        """
        check_bool("full_tensor: everywhere", everywhere)
        if grad_placements is not None:
            if everywhere:
                raise ValueError("full_tensor: everywhere=True and grad_placements: give one")
            axes = axes_of_grad("full_tensor", self.spec.replicated(), grad_placements)
            return resharded(self, self.spec.replicated()).to_local(grad_axes=axes)
        return full_tensor(self, everywhere=everywhere)

    # Views that are attributes -------------------------------------------------------------------

    T = property(lambda x: x.permute(*range(x.spec.ndim - 1, -1, -1)))
    mT = property(lambda x: torch.transpose(x, -2, -1))
    H = property(lambda x: (torch.transpose(x, 0, 1) if x.spec.shape else x).conj())
    mH = property(lambda x: torch.transpose(x, -2, -1).conj())
    real = property(lambda x: torch.real(x) if x.spec.dtype.is_complex else x)
    imag = property(lambda x: torch.imag(x))

    # Numbers, lists, arrays -----------------------------------------------------------------------

    def item(self) -> Any:
        return _value(self).item()

    def tolist(self) -> Any:
        return _value(self).tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        return _value(self).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = _value(self)
        full = value.numpy()
        cast = dtype is not None and np.dtype(dtype) != full.dtype
        owns = storage_id(value.untyped_storage()) != storage_id(self.local.untyped_storage())
        if copy is False and (cast or owns):
            raise ValueError(
                f"numpy: copy=False of {self.spec!r}: its value is gathered, or of another dtype, "
                "so the array has memory of its own. np.asarray(x) copies only where it has to"
            )
        if cast:
            return full.astype(dtype)
        return full.copy() if copy else full

    def __bool__(self) -> bool:
        return bool(_value(self))

    def __int__(self) -> int:
        return int(_value(self))

    def __index__(self) -> int:
        return _value(self).__index__()

    def __float__(self) -> float:
        return float(_value(self))

    def __complex__(self) -> complex:
        return complex(_value(self))

    def __contains__(self: Any, element: Any) -> bool:
        return bool((self == element).any())

    def __iter__(self: Any) -> Iterator[Any]:
        if not self.spec.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(torch.unbind(self, 0))

    # Text -----------------------------------------------------------------------------------------

    def __format__(self, spec: str) -> str:
        if self.spec.shape:
            return object.__format__(self, spec)
        here = (
            not self.spec.layout.partial and self.is_initialized and not values_everywhere.current()
        )
        return format(self.local.item() if here else self.item(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns the spec, then the piece of this rank. No communication."""
        kind = "Parameter of DistTensor" if self._is_param else "DistTensor"
        grad = ", requires_grad" if self.local.requires_grad else ""
        piece = "this rank is outside: no data"
        if self.is_initialized:
            piece = f"rank {world()[0]}: {self.local.detach()!r}"
        return f"{kind}({self.spec!r} on {self.spec.mesh!r}{grad}; {piece})"
