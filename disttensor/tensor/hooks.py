"""Hooks on gradients: of leaves by ``LeafHooks``, of other tensors on their locals."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from disttensor.autograd.grad_types import GradType, gradient_type
from disttensor.autograd.split_backward import mark_hooked
from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor, make
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.leaf_hooks import agree_on_hook, leaf_hooks
from disttensor.tensor.reshard import local_of_global
from disttensor.tensor.uses import derivation_of, forget_derivation, leaves_of
from disttensor.tensor.versions import version

Tensor = torch.Tensor
_SHOWN = "_disttensor_shown"  # attribute of a local gradient: weak references to DistTensors of it


def _registered(hooks: OrderedDict[int, Callable[[Any], Any]], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class Hooks(MeshTensor):
    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers a hook, as Tensor.register_hook does. The hook gets the gradient as a
        DistTensor and may return another one. All ranks of the mesh register it."""
        if not self.is_initialized and self.local.requires_grad:
            return RemovableHandle(OrderedDict())  # the gradient does not come here
        collector = collector_of(self)
        if collector is not None:
            raise RuntimeError(
                f"register_hook on {self.spec!r}: under {collector.feature} the gradient collects "
                "on a temporary copy. register_post_accumulate_grad_hook is called when "
                "the parameter has its gradient; to change it, change p.grad there"
            )
        if self.local.is_leaf and self.local.requires_grad:
            agree_on_hook(self, "register_hook")
            return _registered(leaf_hooks(self).tensor_hooks, hook)
        if len(leaves_of(self)) > 1:
            raise RuntimeError(
                f"register_hook on {self.spec!r}: parts of its gradient do not pass through it any "
                "more, because it is a view or a reshard, and calls have used it. Register the "
                "hook before its first use"
            )
        make_from_local(self, "register_hook")
        mark_hooked(self.local.grad_fn)
        return self.local.register_hook(_on_local(type(self), self.spec, hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers a hook that is called with this leaf once per backward, when all its uses have
        their gradients."""
        if not self.local.is_leaf:
            raise RuntimeError(
                "post accumulate grad hooks cannot be registered on non-leaf tensors"
            )
        if not self.local.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if not self.is_initialized:
            return RemovableHandle(OrderedDict())
        collector = collector_of(self)
        if collector is not None:
            return _registered(collector.hooks, hook)
        agree_on_hook(self, "register_post_accumulate_grad_hook")
        return _registered(leaf_hooks(self).post_hooks, hook)

    def retain_grad(self) -> None:
        if self.local.is_leaf:
            self.local.retain_grad()  # nothing to do, or torch's error
        elif self.is_initialized:
            for _, t in leaves_of(self):
                mark_hooked(t.grad_fn)
                t.retain_grad()


def make_from_local(x: MeshTensor, who: str) -> None:
    """Makes later uses of x from its local, for the call ``who``, which all ranks of the mesh
    make."""
    if derivation_of(x) is not None:
        agree_on_hook(x, who)
        forget_derivation(x)


def _on_local(cls: Any, spec: DistSpec, hook: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    """Returns ``hook`` for the gradient of a local of ``spec``. It holds no reference to the
    tensor, in whose graph it stays."""

    def local_hook(g: Tensor | None) -> Any:
        if g is None:  # of an output of unbind that no use needs
            return hook(None)
        grad = on_local(cls, spec, g)
        before = version(grad.local)
        out = hook(grad)
        if out is None and grad.local is not g and version(grad.local) != before:
            out = grad  # a copy of g, which the hook wrote to in place
        return None if out is None else to_local(spec, out)

    return local_hook


def _grad_spec_of(spec: DistSpec, dtype: torch.dtype) -> tuple[DistSpec, float]:
    """Returns the spec of the gradient of a local, and its divisor (for a pending average)."""
    typed, divided = gradient_type(GradType(spec))
    return typed.spec.with_dtype(dtype), divided


def on_local(cls: Any, of: DistSpec, g: Tensor) -> MeshTensor:
    """Returns the gradient ``g`` of the local of a non-leaf of the spec ``of`` as a DistTensor: the
    same object for each hook, as long as a hook refers to it."""
    spec, scale = key = _grad_spec_of(of, g.dtype)
    known = g.__dict__.get(_SHOWN, {}).get(key)
    found: MeshTensor | None = None if known is None else known()
    if found is None or found.spec is not spec:
        found = make(cls, g if scale == 1.0 else g * scale, spec)
        g.__dict__.setdefault(_SHOWN, {})[key] = weakref.ref(found)
    return found


def to_local(of: DistSpec, out: Tensor) -> Tensor:
    """Converts the gradient returned by a hook to a gradient of the local."""
    spec, scale = _grad_spec_of(of, out.dtype)
    local = local_of_global(out, spec)
    local = local if scale == 1.0 else local / scale
    if isinstance(out, MeshTensor) and out.spec is spec:  # the next hook gets the same object
        local.__dict__.setdefault(_SHOWN, {})[spec, scale] = weakref.ref(out)
    return local
