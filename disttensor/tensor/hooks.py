"""Hooks on gradients. Hooks on a leaf see the reduced gradient: later uses reduce it in the
backward."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from disttensor.autograd.grad_types import GradType, gradient_type
from disttensor.autograd.joined_backward import run_after_backward, this_backward
from disttensor.autograd.split_backward import mark_hooked
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.reshard import resharded
from disttensor.tensor.uses import hook as hook_uses
from disttensor.tensor.uses import leaves_of
from disttensor.tensor.versions import version
from reshard import cross_mesh

Tensor = torch.Tensor
_SHOWN = "_disttensor_shown"  # attribute of a local gradient: weak references to DistTensors of it


class Handles(RemovableHandle):
    """Removes a hook from all tensors on which it was registered. ``id`` is unique."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__(OrderedDict())
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Hooks(MeshTensor):
    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers a hook, as Tensor.register_hook does. The hook gets the gradient as a
        DistTensor and may return another one."""
        if not self.is_initialized and self.local.requires_grad:
            return Handles([])  # the gradient does not come here
        collector = collector_of(self)
        if collector is not None:
            raise RuntimeError(
                f"register_hook on {self.spec!r}: under {collector.feature} the gradient collects "
                "on a temporary copy. register_post_accumulate_grad_hook is called when "
                "the parameter has its gradient; to change it, change p.grad there"
            )
        hook_uses(self, of_leaf=self.local.is_leaf)
        found = leaves_of(self)
        for _, t in found:
            mark_hooked(t.grad_fn)
        return Handles([t.register_hook(_on_local(self, hook, axes)) for axes, t in found])

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Registers a hook that is called with this leaf once per backward, when all its uses have
        their gradients."""
        if not self.local.is_leaf:
            raise RuntimeError(
                "post accumulate grad hooks cannot be registered on non-leaf tensors"
            )
        if not self.is_initialized:
            return Handles([])
        collector = collector_of(self)
        if collector is not None:
            handle = RemovableHandle(collector.hooks)
            collector.hooks[handle.id] = hook
            return handle
        hook_uses(self, of_leaf=True)
        waiting = [-1]  # the backward at whose end the hook runs (not after an error)

        def done() -> None:
            waiting[0] = -1
            hook(self)

        def on(_: Tensor) -> None:
            if waiting[0] != this_backward():
                waiting[0] = this_backward()
                run_after_backward(done)

        return Handles([leaf.register_post_accumulate_grad_hook(on) for _, leaf in leaves_of(self)])

    def retain_grad(self) -> None:
        if self.local.is_leaf:
            self.local.retain_grad()  # nothing to do, or torch's error
        elif self.is_initialized:
            hook_uses(self)
            for _, t in leaves_of(self):
                mark_hooked(t.grad_fn)
                t.retain_grad()


def _on_local(x: MeshTensor, hook: Callable[[Any], Any], axes: Axes) -> Callable[[Tensor], Any]:
    """Returns ``hook`` for the gradient of the local of x's use varying over ``axes``."""

    def local_hook(g: Tensor) -> Any:
        grad = on_local(x, g, axes)
        before = version(grad.local)
        out = hook(grad)
        if out is None and grad.local is not g and version(grad.local) != before:
            out = grad  # a copy of g, which the hook wrote to in place
        return None if out is None else to_local(x, out, axes)

    return local_hook


def _grad_spec_of(x: MeshTensor, axes: Axes, dtype: torch.dtype) -> tuple[DistSpec, float]:
    """Returns the spec of the gradient of a local, and its divisor (for a pending average)."""
    typed, divided = gradient_type(GradType(x.spec, axes))
    return typed.spec.with_dtype(dtype), 1.0 if x.local.is_leaf else divided


def on_local(x: MeshTensor, g: Tensor, axes: Axes = ()) -> MeshTensor:
    """Returns the gradient ``g`` of the local of x's use varying over ``axes`` as a DistTensor: the
    same object for each hook, as long as a hook refers to it."""
    spec, scale = _grad_spec_of(x, axes, g.dtype)
    key = spec, scale
    known = g.__dict__.get(_SHOWN, {}).get(key)
    found: MeshTensor | None = None if known is None else known()
    if found is None or found.spec is not spec:
        found = x.like(g if scale == 1.0 else g * scale, spec)
        g.__dict__.setdefault(_SHOWN, {})[key] = weakref.ref(found)
    return found


def to_local(x: MeshTensor, out: Tensor, axes: Axes = ()) -> Tensor:
    """Converts the gradient returned by a hook to a gradient of the local."""
    spec, scale = _grad_spec_of(x, axes, out.dtype)
    if isinstance(out, MeshTensor):
        local = resharded(out, spec).local
    else:
        local = cross_mesh.run(out, spec.replicated(), spec)
    local = local if scale == 1.0 else local / scale
    if isinstance(out, MeshTensor) and out.spec is spec:  # the next hook gets the same object
        local.__dict__.setdefault(_SHOWN, {})[spec, scale] = weakref.ref(out)
    return local
