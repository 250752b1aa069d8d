"""In-place changes that compute nothing: requires_grad_, detach_, data, set_, and a change of
shape."""

# mypy: disable-error-code="override"

from __future__ import annotations

import weakref
from typing import Any, Self

import torch

from disttensor.autograd import token
from disttensor.autograd.grad_types import scale_average_grad
from disttensor.core.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.grad import get_grad, set_grad
from disttensor.tensor.grad_slot import collector_of, grad_slot, remember_grad
from disttensor.tensor.reshard import resharded
from disttensor.tensor.uses import invalidate, leaves_of, made_from
from disttensor.tensor.versions import mark_shared
from disttensor.torch_private import no_torch_function

Tensor = torch.Tensor


class InPlace(MeshTensor):
    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        leaf = self.local.is_leaf
        if not leaf and not requires_grad:
            raise RuntimeError(
                "only the requires_grad flag of leaves can be switched off; use detach()"
            )
        if not self.is_initialized:
            if requires_grad is not self.local.requires_grad:
                _replace_token(self, requires_grad)
            return self
        token.replacements[0] += requires_grad is not self.local.requires_grad
        for _, t in leaves_of(self) if leaf else [((), self.local)]:
            t.requires_grad_(requires_grad)
        if requires_grad and leaf:
            scale_average_grad(self.local, self.spec)
        return self

    def detach(self) -> Self:
        return _share_memory(self, self.local.detach())

    def detach_(self) -> Self:
        if not self.is_initialized:
            _replace_token(self, False)
        elif self.local.is_leaf:
            self.requires_grad_(False)
        else:
            self.local.detach_()
            self._uses = None
        return self

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Gives x the memory of another DistTensor."""
        if not isinstance(source, MeshTensor) or args or kwargs:
            raise TypeError(
                f"set_ of {self.spec!r}: a DistTensor is expected, and nothing else: memory and "
                "strides are those of one process. Use shard_tensor(source, mesh, placements)"
            )
        if source.spec.dtype is not self.spec.dtype:
            raise RuntimeError(
                f"set_ of {self.spec!r}: the source is {source.spec!r}, of another dtype"
            )
        if self.local.requires_grad and self.local.is_leaf and torch.is_grad_enabled():
            raise RuntimeError(
                f"set_ of {self.spec!r}: a leaf that requires grad is changed in place. Use "
                "torch.no_grad()"
            )
        self.data = source
        if self.is_initialized and not self.local.is_inference():
            torch.autograd.graph.increment_version(self.local)  # a graph may have saved it
        return self

    @property
    def data(self) -> Self:
        out = _share_memory(self, self.local.data)
        views.view_state(out).uncounted = True
        views.mark_given_out(self)
        return out

    @data.setter
    def data(self, value: Any) -> None:
        """Gives x the piece and the layout of ``value``, for all uses of x."""
        if not isinstance(value, MeshTensor):
            raise TypeError(
                f"data of {self.spec!r}: a DistTensor is expected; use shard_tensor(value, mesh, "
                "placements)"
            )
        slot = self._grad_slot
        if slot is not None and slot.fixed_by and value.spec is not self.spec:
            facts = [(x.spec.mesh, x.spec.shape, x.spec.dtype) for x in (self, value)]
            if facts[0] != facts[1]:
                raise RuntimeError(
                    f"data of {self.spec!r}: the value is {value.spec!r}, and under "
                    f"{slot.fixed_by} the mesh, the shape and the dtype stay. Change the module "
                    "before it is sharded"
                )
            source: Any = value.detach()
            self.data = resharded(source, self.spec, fresh=True)
            state = value._view_state
            if self.is_initialized and (state is None or state.func is None):
                # in one process they share memory: a later write to one is refused in the other
                views.register_copy(value, self, torch.Tensor.set_)
            return
        changes_layout = value.spec.with_dtype(self.spec.dtype) is not self.spec
        if changes_layout and self.local.requires_grad and not self.local.is_leaf:
            raise RuntimeError(
                f"data of {self.spec!r}: it is the result of a call, whose backward expects a "
                f"gradient in its layout, and the value is {value.spec!r}. Redistribute the value "
                "to the placements of the tensor first"
            )
        grad = _grad_to_move(self, value.spec)
        collector = collector_of(self)
        if collector is not None:
            collector.renew()
        token.replacements[0] += 1
        if not self.is_initialized:
            _replace_token(self, self.local.requires_grad)
        elif value.is_initialized and self.local.is_meta and not value.local.is_meta:
            # torch's own ``data`` cannot replace a meta tensor by a tensor with memory
            _replace_leaf(self, value)
        elif value.is_initialized and changes_layout and self.local.requires_grad:
            _refuse_older_graphs(self, value.spec)
            _replace_leaf(self, value)
            self._sets_of_data += 1
        elif value.is_initialized:
            for _, t in leaves_of(self) if self.local.is_leaf else [((), self.local)]:
                t.data = value.local.data
            mark_shared(self.local)
            self._sets_of_data += 1
        source = value.local
        if value.spec.layout.partial or (source.requires_grad and not source.is_leaf):
            views.view_state(self).uncounted = views.view_state(value).uncounted = True
        invalidate(self)
        if value.spec is not self.spec:
            remember_grad(self, None)
            if grad is not None:
                set_grad(self, None)
            _change_spec(self, value.spec)
            if grad is not None:
                set_grad(self, grad)


def _grad_to_move(x: MeshTensor, spec: DistSpec) -> MeshTensor | None:
    """Returns the gradient of x if x gets another layout, in which the gradient is needed. Raises
    RuntimeError if it cannot be moved there."""
    moves = spec.layout != x.spec.layout or spec.shape != x.spec.shape
    grad = get_grad(x) if moves and x.local.is_leaf else None
    if grad is not None and spec.with_layout(x.spec.layout) is not x.spec:
        raise RuntimeError(
            f"data of {x.spec!r}: it has a gradient, {grad.spec!r}, which does not fit {spec!r}. "
            "Set its grad to None first"
        )
    return grad


def _replace_leaf(x: MeshTensor, value: MeshTensor) -> None:
    """Gives x a new local, with the piece of ``value``."""
    local = value.local.data.requires_grad_(x.local.requires_grad)
    x.local = scale_average_grad(local, value.spec)
    x._uses = None
    mark_shared(local)
    if x._grad_slot is not None and x._grad_slot.hooks is not None:
        x._grad_slot.hooks.watch(local)


def _refuse_older_graphs(x: MeshTensor, spec: DistSpec) -> None:
    """Lets a backward through a graph that has the leaves of x raise an error on all ranks, because
    it would give gradients in the layout that x had. ``spec``: of the new value."""
    what = (
        f"backward through {x.spec!r}: its data were set to a value of another layout, {spec!r}, "
        "after this graph was made, and the gradient is in the old layout. Run the backward first, "
        "or redistribute the value to the placements of the tensor"
    )

    def refuse(_: Tensor) -> None:
        raise RuntimeError(what)

    slot = grad_slot(x)
    for axes, leaf in leaves_of(x):
        leaf.register_hook(refuse)
        slot.replaced.append((axes, weakref.ref(leaf)))


def _replace_token(x: MeshTensor, requires_grad: bool) -> None:
    """Replaces the token of x by a leaf that requires grad, or by one that does not."""
    device = x.spec.mesh.device
    token.replacements[0] += 1
    x.local = token.leaf(device, x.spec.dtype) if requires_grad else token.no_grad_token(device)


def _share_memory(x: InPlace, local: Tensor) -> Any:
    """Returns a DistTensor with the spec of x and ``local``, which shares x's memory."""
    out = x.like(local, x.spec)
    if x._view_state is not None:
        views.inherit_copy(out, x)
    return out


def replace_in_place(x: MeshTensor, value: MeshTensor) -> MeshTensor:
    """Makes x take the local and the spec of ``value``, for an in-place change of shape."""
    if x.local.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            f"{x.spec!r} is a leaf that requires grad: it cannot be changed in place"
        )
    token.replacements[0] += 1
    before = x.like(x.local, x.spec)  # what ``value`` and other results were made from
    before._uses = x._uses
    x.local = value.local
    invalidate(x)
    x._uses = made_from(value, x, before)
    remember_grad(x, None)
    _change_spec(x, value.spec)
    return x


def _change_spec(x: MeshTensor, spec: DistSpec) -> None:
    """Sets the spec of x, and the shape and dtype of its wrapper, which C++ reads."""
    stand_in = x.like(x.local, spec)
    x.spec = spec
    with no_torch_function():
        Tensor.data.__set__(x, stand_in)  # type: ignore[attr-defined]
