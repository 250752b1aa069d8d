"""Attributes, hooks and the gradient that a user put on a tensor. ``carry_over`` brings them to the
tensor that takes its place in a module.

A hook keeps its dict, in which the handle of its user looks it up: ``handle.remove()`` works after
the placement too.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from disttensor.comm.agree import agree
from disttensor.comm.compare_values import digest_of
from disttensor.comm.process_group import is_fake
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import user_place
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.checkpointable import Checkpointable
from disttensor.tensor.leaf_hooks import leaf_hooks

Tensor = torch.Tensor
Hooks = OrderedDict[int, Callable[[Any], Any]]

_KINDS = "register_hook", "register_post_accumulate_grad_hook"
_COMPARED: ContextVar[bool | None] = ContextVar("compared", default=None)
# attributes that the user did not set
_OWN = MeshTensor.__annotations__.keys() | Checkpointable.__annotations__.keys() | {"_replaced"}


def user_attributes(x: Tensor) -> dict[str, Any]:
    """Returns the attributes that the user set on x."""
    return {name: value for name, value in x.__dict__.items() if name not in _OWN}


def pass_attributes(old: Tensor, new: Tensor, *, exactly: bool = False) -> None:
    """Gives ``new`` the user's attributes of ``old``; ``exactly``: and no others."""
    if exactly and not new.__dict__.keys() <= _OWN:
        for name in user_attributes(new):
            del new.__dict__[name]
    if not old.__dict__.keys() <= _OWN:
        new.__dict__.update(user_attributes(old))


def hooks_of(x: Any) -> tuple[Hooks, Hooks]:
    """Returns the tensor hooks of the leaf x, and its hooks after accumulation."""
    if isinstance(x, MeshTensor):
        found = None if x._grad_slot is None else x._grad_slot.hooks
        hooks = (None, None) if found is None else (found.tensor_hooks, found.post_hooks)
    else:
        hooks = x._backward_hooks, x._post_accumulate_grad_hooks
    first, second = [OrderedDict() if h is None else h for h in hooks]
    return first, second


def compare_placed(
    who: str, placed: Iterable[tuple[str, Tensor, ProcessMesh | None]], values: bool = False
) -> list[ProcessMesh]:
    """Compares the tensors (name, tensor, its new mesh) that a module's placement replaces. Every
    rank of a mesh sends one message for the mesh, whatever it has. Raises MismatchError on all of
    them for a hook on some ranks only, which would make these ranks reduce. ``values``: also for
    other shapes or dtypes; returns the meshes whose ranks have other values."""
    hooked: dict[ProcessMesh, tuple[list[str], list[tuple[str, str]]]] = {}
    if (known := _COMPARED.get()) is not None:
        return [mesh for _, _, mesh in placed if known and mesh is not None]
    for name, x, mesh in placed:
        if mesh is not None and mesh.coordinate is not None and mesh.size > 1:
            names, digests = hooked.setdefault(mesh, ([], []))
            if x.is_leaf:
                kinds = zip(_KINDS, hooks_of(x), strict=True)
                names += [f"{name}.{kind}" for kind, hooks in kinds if hooks]
            if values and not isinstance(x, MeshTensor) and not is_fake():
                digests.append(digest_of(x))
    differing = []
    for mesh, (names, digests) in hooked.items():
        group = mesh.group(tuple(range(mesh.ndim)))
        tensors = ", ".join(kind for kind, _ in digests)
        facts = {"hooks": f"hooks of {names}", "tensors": f"the tensors {tensors}"}
        first, *others = agree(who, group, digests, **facts)
        if any(theirs != first for theirs in others):
            differing.append(mesh)
    return differing


@contextmanager
def compared(differing: bool) -> Iterator[None]:
    """In this context ``compare_placed`` sends nothing, because all tensors that are placed were
    compared. ``differing``: the ranks have other values of some."""
    before = _COMPARED.set(differing)
    try:
        yield
    finally:
        _COMPARED.reset(before)


def carry_over(old: Any, new: MeshTensor, what: str) -> None:
    """Gives ``new``, which takes the place of ``old`` in a module, the attributes, the hooks and
    the gradient of ``old``. ``what`` says in warnings and errors what became of ``old``: a gradient
    that reaches it from now on is lost for ``new``, with a warning."""
    pass_attributes(old, new)
    old._replaced = what
    if not old.is_leaf or not (old.dtype.is_floating_point or old.dtype.is_complex):
        return
    tensor_hooks, post_hooks = hooks_of(old)
    if new.is_initialized and (tensor_hooks or post_hooks):
        own = leaf_hooks(new)
        own.tensor_hooks, own.post_hooks = tensor_hooks, post_hooks
    if old.grad_dtype is not old.dtype:
        new.grad_dtype = old.grad_dtype
    grad = old.grad
    if grad is not None and not grad.is_meta:
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        new.grad = grad if isinstance(grad, MeshTensor) else grad.detach().to(new.device)
    warn: Hooks = OrderedDict({-1: partial(_warn, what)})
    if not isinstance(old, MeshTensor):
        old._backward_hooks = warn
    elif old.is_initialized:
        stale = leaf_hooks(old)
        stale.tensor_hooks, stale.post_hooks = OrderedDict(), warn


def _warn(what: str, _: Tensor) -> None:
    place = user_place(sys._getframe(1)) or ("unknown", 0)
    text = (
        f"a backward reaches a parameter that was replaced: {what} when the model was sharded. Its "
        "gradient does not reach the parameter that the optimizer updates. A list of parameters, a "
        "module in a Python list, or an attribute of another object still holds the old one: take "
        "model.parameters() after sharding, and make the module a submodule (nn.ModuleList)"
    )
    warnings.warn_explicit(text, UserWarning, *place)
