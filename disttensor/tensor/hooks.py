"""Hooks on gradients. Those on a leaf see the whole gradient: uses from then on reduce it in the
backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import reshard
from disttensor.autograd.grad_types import Typed, dual
from disttensor.autograd.joined_backward import when_over
from disttensor.autograd.split_backward import watched
from disttensor.layout import Axes
from disttensor.spec import DistSpec
from disttensor.tensor.base import MeshTensor, collector_of, freeze_leaves, grad_leaves
from disttensor.tensor.reshard import resharded

Tensor = torch.Tensor


class Handles(RemovableHandle):
    """Removes a hook from all tensors that it was put on. ``id`` is a number of its own."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__(OrderedDict())
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Hooks(MeshTensor):
    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """The hook gets the gradient as a DistTensor and may give another one, as for a plain
        tensor."""
        if not self.is_initialized and self.local.requires_grad:
            return Handles([])  # the gradient does not come here
        collector = collector_of(self)
        if collector is not None:
            raise RuntimeError(
                f"register_hook on {self.spec!r}: under {collector.feature} the gradient collects "
                "on a copy that comes and goes. register_post_accumulate_grad_hook is called when "
                "the parameter has its gradient; to change it, change p.grad there"
            )
        freeze_leaves(self, hooked=self.local.is_leaf)
        found = grad_leaves(self)
        for _, t in found:
            watched(t.grad_fn)
        return Handles([t.register_hook(_on_local(self, hook, axes)) for axes, t in found])

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """The hook is called with this leaf once per backward, when all its uses have their
        gradient."""
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
        freeze_leaves(self, hooked=True)
        waiting: list[bool] = []

        def done() -> None:
            waiting.clear()
            hook(self)

        def on(_: Tensor) -> None:
            if not waiting:
                waiting.append(True)
                when_over(done)

        return Handles(
            [leaf.register_post_accumulate_grad_hook(on) for _, leaf in grad_leaves(self)]
        )

    def retain_grad(self) -> None:
        if self.local.is_leaf:
            self.local.retain_grad()  # nothing to do, or torch's error
        elif self.is_initialized:
            freeze_leaves(self)
            for _, t in grad_leaves(self):
                watched(t.grad_fn)
                t.retain_grad()


def _on_local(x: MeshTensor, hook: Callable[[Any], Any], axes: Axes) -> Callable[[Tensor], Any]:
    """``hook`` for the gradient of the local of x's use varying over ``axes``."""

    def local_hook(g: Tensor) -> Any:
        out = hook(on_local(x, g, axes))
        return None if out is None else to_local(x, out, axes)

    return local_hook


def _meaning(x: MeshTensor, axes: Axes, dtype: torch.dtype) -> tuple[DistSpec, float]:
    """What the gradient of a local is a piece of, and by how much it is divided (of a pending
    average)."""
    typed, divided = dual(Typed(x.spec, axes))
    return typed.spec.with_dtype(dtype), 1.0 if x.local.is_leaf else divided


def on_local(x: MeshTensor, g: Tensor, axes: Axes = ()) -> MeshTensor:
    """The gradient ``g`` of the local of x's use varying over ``axes``, as a DistTensor."""
    spec, scale = _meaning(x, axes, g.dtype)
    return x.like(g if scale == 1.0 else g * scale, spec)


def to_local(x: MeshTensor, out: Tensor, axes: Axes = ()) -> Tensor:
    """The way back, of what a hook gives."""
    spec, scale = _meaning(x, axes, out.dtype)
    if isinstance(out, MeshTensor):
        local = resharded(out, spec).local
    else:
        local = reshard.run(out, spec.replicated(), spec)
    return local if scale == 1.0 else local / scale
