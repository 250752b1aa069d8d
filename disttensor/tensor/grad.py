"""``grad``: joins the gradients collected on the leaves of a tensor into one DistTensor.

It is ``Partial`` over the axes on which it is still a sum of contributions.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch

from disttensor.autograd.grad_types import GradType, gradient_type, reshard_local
from disttensor.core.layout import Axes, Layout
from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.grad_slot import (
    SHOWN,
    collector_of,
    drop_grads,
    keep_grad,
    remember_grad,
    shown_grad,
)
from disttensor.tensor.reshard import local_of_global
from disttensor.tensor.uses import invalidate, leaves_of

Tensor = torch.Tensor
T = TypeVar("T", bound=MeshTensor)


class Grad(MeshTensor):
    """Attributes of autograd, read from the local."""

    @property
    def grad_fn(self) -> Any:
        return self.local.grad_fn

    @property
    def is_leaf(self) -> bool:
        return self.local.is_leaf

    @property
    def retains_grad(self) -> bool:
        return self.local.retains_grad

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradients of this leaf; None: any dtype."""
        return self.local.grad_dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        for _, leaf in leaves_of(self):
            leaf.grad_dtype = value

    @property
    def grad(self) -> Self | None:
        return get_grad(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_grad(self, None)


def grad_spec(x: MeshTensor, axes: Axes) -> DistSpec:
    """Returns the spec of a gradient that was collected for uses varying over ``axes``."""
    return gradient_type(GradType(x.spec, axes))[0].spec


def combine_gradients(x: MeshTensor, pieces: Sequence[tuple[Axes, Tensor]]) -> tuple[Axes, Tensor]:
    """Adds gradients of several uses into one that is Partial over all their axes.

    A gradient that is whole on some of these axes counts once, on the first rank of those axes.
    """
    if len(pieces) == 1:
        return pieces[0]
    union = tuple(sorted({a for axes, _ in pieces for a in axes}))
    # for a second derivative, every rank keeps all gradients in the graph
    if any(g.requires_grad for _, g in pieces):
        to = gradient_type(GradType(x.spec, union))[0]
        types = [gradient_type(GradType(x.spec, axes))[0] for axes, _ in pieces]
        moved = [
            g if t == to else reshard_local(g, t, to, None)
            for t, (_, g) in zip(types, pieces, strict=True)
        ]
        return union, sum(moved[1:], start=moved[0])
    coordinate = x.spec.mesh.coordinate or ()
    total = None
    for axes, g in pieces:
        if not any(coordinate[a] for a in union if a not in axes):
            total = g if total is None else total + g
    return union, torch.zeros_like(x.local) if total is None else total


def get_grad(x: T) -> T | None:
    """Returns the gradient of x, one object per gradient tensor, so that ``p.grad is p.grad``."""
    slot = x._grad_slot
    axes: Axes = ()
    if slot is not None and slot.collector is not None:
        waiting: T | None = slot.collector.waiting()
        if waiting is not None:
            if slot.grad is not waiting:
                remember_grad(x, waiting)
            return waiting
    uses = x._uses  # ``waiting`` may have moved the gradient to a leaf of x
    if uses is None or uses.aliases is None:
        total = x.local.grad
        if total is None:
            return None
    else:
        pieces = [(a, leaf.grad) for a, leaf in leaves_of(x) if leaf.grad is not None]
        if not pieces:
            return None
        axes, total = combine_gradients(x, pieces)
        if len(pieces) > 1:
            drop_grads(x)
            keep_grad(x, axes, total)
            shown = shown_grad(x)
            if shown is not None and any(shown.local is g for _, g in pieces):
                _update_shown(shown, x, axes, total)
    if slot is not None and slot.grad is not None and slot.grad.local is total:
        return slot.grad
    grad = as_gradient(x, axes, total)
    if grad.local is total:
        remember_grad(x, grad)
    return grad


def update_shown() -> None:
    """Adds what the last backward has collected to the gradients that were shown before: torch
    accumulates in place, and the program may hold ``p.grad``."""
    for key, ref in list(SHOWN.items()):
        x = ref()
        if x is None or shown_grad(x) is None:
            SHOWN.pop(key, None)
        elif x.local.is_leaf:
            get_grad(x)


def _update_shown(shown: MeshTensor, x: MeshTensor, axes: Axes, total: Tensor) -> None:
    """Updates ``shown``, an earlier result of ``x.grad``, to the accumulated gradient, as torch
    does. A gradient with a graph stays as it was, as in torch."""
    if is_gradient(shown) and not total.requires_grad:
        shown.local, shown.spec = total, as_gradient(x, axes, total).spec
        invalidate(shown)


def as_gradient(x: T, axes: Axes, g: Tensor) -> T:
    """Returns the gradient ``g`` of x's local (of its use varying over ``axes``) as the gradient of
    x."""
    typed, divided = gradient_type(GradType(x.spec, axes))
    if divided != 1.0 and not x.local.is_leaf:
        g = g * divided
    # in the graph it is read varying; later uses of it are not varying
    if typed.varying and g.requires_grad:
        g = reshard_local(g, typed, GradType(typed.spec), None)
    return x.like(g, typed.spec.with_dtype(g.dtype))


def is_gradient(g: MeshTensor) -> bool:
    """Returns True if ``g`` is the result of some ``.grad``."""
    slot = g._grad_slot
    return slot is not None and slot.owner is not None


def owner_of(g: T) -> T | None:
    """Returns the leaf whose current gradient is ``g``, or None. A gradient with a graph has no
    owner: a reduction in place would drop its graph."""
    if g.local.requires_grad and torch.is_grad_enabled():
        return None
    slot = g._grad_slot
    x = None if slot is None or slot.owner is None else slot.owner()
    return x if x is not None and shown_grad(x) is g and get_grad(x) is g else None


def reduced_spec(spec: DistSpec) -> DistSpec:
    """Returns ``spec``, of a pending gradient, after its reduction."""
    return spec.with_layout(Layout(spec.layout.dims, (), spec.layout.custom))


def set_reduced(x: MeshTensor, g: MeshTensor, total: Tensor) -> None:
    """Sets ``g``, the pending gradient of ``x``, to its reduction ``total``, in the same object."""
    drop_grads(x)
    g.local, g.spec = total, reduced_spec(g.spec)
    x.local.grad = total


def set_grad(x: MeshTensor, value: Any) -> None:
    """Sets the gradient of x: None, a DistTensor (pending reductions stay pending), or a regular
    tensor with the global value."""
    slot = x._grad_slot
    if value is None and (slot is None or slot.collector is None):  # the fast path of each step
        drop_grads(x)
        if slot is not None:
            slot.grad = None
        return
    collector = collector_of(x)
    if collector is not None:
        if value is not None and value is collector.waiting():
            return
        collector.drop()
    if value is None:
        drop_grads(x)
        remember_grad(x, None)
        return
    _check(x, value)
    if not x.is_initialized:
        return  # gradients are where the values are
    axes: Axes = ()
    if isinstance(value, MeshTensor) and x.local.is_leaf:  # others cannot hold a pending gradient
        whole = x.spec.varies
        axes = tuple(a for a, op in value.spec.layout.partial if op == "sum" and a not in whole)
    local = local_of_global(value, grad_spec(x, axes).with_dtype(value.dtype))
    if not local.is_contiguous() and x.local.is_contiguous():  # a slice needs its own memory
        local = local.contiguous()
    divided = 1.0 if x.local.is_leaf else gradient_type(GradType(x.spec, ()))[1]
    if divided != 1.0:  # as_gradient multiplies by it
        local = local / divided
    drop_grads(x)
    remember_grad(x, value if isinstance(value, MeshTensor) and local is value.local else None)
    keep_grad(x, axes, local)


def _check(x: MeshTensor, value: Any) -> None:
    """Raises TypeError or RuntimeError if ``value`` cannot be the gradient of x."""
    who = f"grad of {x.spec!r}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{who}: a tensor or None is expected, not {type(value).__name__}")
    if tuple(value.shape) != tuple(x.spec.shape):
        raise RuntimeError(
            f"{who}: its global shape is {list(x.spec.shape)}, the gradient's {list(value.shape)}"
        )
    dtype = x.grad_dtype if x.is_leaf else x.dtype
    if dtype is not None and value.dtype != dtype:
        raise RuntimeError(f"{who}: its dtype is {dtype}, the gradient's {value.dtype}")
    if isinstance(value, MeshTensor) and x.is_initialized and value.spec.mesh is not x.spec.mesh:
        raise RuntimeError(
            f"{who} on {x.spec.mesh!r}: the gradient is on {value.spec.mesh!r}; reshard it first"
        )
