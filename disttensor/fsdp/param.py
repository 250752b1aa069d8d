"""A parameter in its two states: sharded between steps, unsharded while it is used.

The module, the optimizer and a checkpoint see ``sharded_param``: a DistTensor that the shard axis
splits. During a forward or backward of its segment the module holds ``unsharded_param`` instead. It
is not split by that axis and has the dtype of the computation. It is a leaf, so it collects
gradients by the axes over which uses vary (``DistTensor.local_for``). Their reduction is added to
the gradient of ``sharded_param``. If nothing is split or cast, both are one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import nn

from disttensor.autograd import token
from disttensor.core.layout import Axes, Layout
from disttensor.fsdp.bucket import chunk_of
from disttensor.nn.parameters import Slot
from disttensor.tensor.base import as_parameter
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import as_gradient, combine_gradients, get_grad, grad_spec, set_grad
from disttensor.tensor.grad_slot import (
    fix_spec,
    grad_slot,
    keep_grad,
    remember_grad,
    set_collector,
    shown_grad,
)
from disttensor.tensor.reshard import resharded
from disttensor.tensor.user_facts import pass_attributes
from disttensor.tensor.uses import count_leaves, leaves_of
from disttensor.tensor.versions import version
from disttensor.torch_private import current_backward

Tensor = torch.Tensor


class FSDPParam:
    """axis: the mesh axis that splits dim ``dim`` of ``sharded_param``, or None. spec: of
    ``unsharded_param``. reduce_dtype: of sums between ranks."""

    feature = "shard_data_parallel"  # for errors of disttensor.tensor

    def __init__(
        self, name: str, param: DistTensor, slots: list[Slot], axis: int | None, dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.name, self.sharded_param, self.slots = name, param, slots
        self.reduce_dtype = reduce_dtype
        fix_spec(param, self.feature)
        spec, dims = param.spec, param.spec.layout.dims
        self.axis, self.dim = None, 0
        if axis is not None and axis in spec.layout.sharded and spec.mesh.shape[axis] > 1:
            self.axis, self.dim = axis, next(d for d, axes in enumerate(dims) if axis in axes)
            rest = tuple(tuple(a for a in axes if a != axis) for axes in dims)
            spec = spec.with_layout(Layout(rest, spec.layout.partial, spec.layout.custom))
        self.spec = spec.with_dtype(dtype)
        self.unsharded_param: DistTensor = param
        self._times_renewed = 0  # how often ``p.data = x`` has been done
        # gradients so far, in the dtype of the sharded parameter, to be summed over these axes
        self._sum: tuple[Axes, Tensor] | None = None
        self._shown: DistTensor | None = None  # the last ``p.grad`` of a gradient that waits
        self._hooked = 0  # number of leaves that ``new_leaves`` has returned
        self._axes: Axes = ()
        self._leaves_seen: list[Axes] = []  # when ``_axes`` was computed
        # of users, after accumulation
        self.hooks: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
        self._accumulated = False
        self.all_reduce_hook: Callable[[Tensor], Any] | None = None  # see ``FSDPModule``

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPParam:
        param, slots = deepcopy((self.sharded_param, self.slots), memo)
        args = self.name, param, slots, self.axis, self.spec.dtype, self.reduce_dtype
        new = memo[id(self)] = FSDPParam(*args)
        return new

    @property
    def is_copy(self) -> bool:
        return self.unsharded_param is not self.sharded_param

    def set_unsharded(self, param: DistTensor) -> None:
        self.unsharded_param = as_parameter(param)
        token.replacements[0] += 1  # modules will show another tensor

    def use_memory(self, memory: Tensor) -> None:
        """Makes ``memory`` the local of ``unsharded_param``. Autograd counts writes to it apart
        from writes to the other parameters in this memory."""
        leaf = memory.data.requires_grad_(self.sharded_param.requires_grad)
        self.set_unsharded(wrap(leaf, self.spec))
        set_collector(self.sharded_param, self)
        found = grad_slot(self.sharded_param).hooks
        if found is not None:  # registered before: called when the sharded parameter has its sum
            self.hooks, found.post_hooks = found.post_hooks, OrderedDict()

    def show_unsharded(self) -> None:
        requires_grad = self.sharded_param.local.requires_grad
        if self.unsharded_param.local.requires_grad is not requires_grad:
            self.unsharded_param.requires_grad_(requires_grad)
        self._swap(self.sharded_param, self.unsharded_param)

    def show_sharded(self) -> None:
        self._swap(self.unsharded_param, self.sharded_param)

    def _swap(self, old: DistTensor, new: DistTensor) -> None:
        """Replaces ``old`` by ``new`` in the modules, unless another tensor was set there. Guards
        of skipped modules must not see it, so it bypasses them and writes to the present table of
        the owner: a guard may have replaced ``slot.table``. Attributes that the user set are seen
        on both."""
        pass_attributes(old, new, exactly=old is self.sharded_param)
        for slot in self.slots:
            table: Any = slot.owner._parameters
            if table.get(slot.key) is old:
                dict.__setitem__(table, slot.key, new)

    def renew(self) -> None:
        """Counts ``p.data = x``."""
        self._times_renewed += 1

    def version(self) -> tuple[int, int]:
        """Returns a value that changes with each counted write to ``sharded_param``, also on ranks
        without a row."""
        return version(self.sharded_param.local), self._times_renewed

    # Gradients of ``unsharded_param`` -------------------------------------------------------------

    def grad_leaves(self) -> list[tuple[Axes, Tensor]]:
        """Returns (axes over which the uses vary, leaf that collects their gradient) of each use,
        without the leaf of ``sharded_param`` itself, whose gradient is complete."""
        return [use for use in leaves_of(self.unsharded_param) if self.is_copy or use[0]]

    def new_leaves(self) -> list[Tensor]:
        """Returns the leaves made since the last call, also the leaf of ``sharded_param``."""
        if not self.unsharded_param.local.requires_grad:
            return []
        if count_leaves(self.unsharded_param) == self._hooked:  # most often
            return []
        leaves = [leaf for _, leaf in leaves_of(self.unsharded_param)]
        new, self._hooked = leaves[self._hooked :], len(leaves)
        return new

    def hooked_leaves(self) -> list[Tensor]:
        """Returns the leaves that ``new_leaves`` has returned."""
        return [leaf for _, leaf in leaves_of(self.unsharded_param)][: self._hooked]

    def pending_axes(self) -> Axes:
        """Returns the axes to sum the gradient over: some use varied. The same on all ranks."""
        varying = [axes for axes, _ in leaves_of(self.unsharded_param)]
        if varying != self._leaves_seen:
            shape = self.spec.mesh.shape
            found = {a for axes in varying for a in axes if shape[a] > 1}
            self._leaves_seen, self._axes = varying, tuple(sorted(found))
        return self._axes

    @cached_property
    def divisible(self) -> bool:
        """True if all ranks have locals of one size. Other parameters get their own bucket: the
        order in which a backend sums depends on the offset, and replicas must get the same bits."""
        return self.spec.is_even()

    def has_grads(self) -> bool:
        return self._sum is not None or any(leaf.grad is not None for _, leaf in self.grad_leaves())

    @property
    def collects(self) -> bool:
        """True if the gradient must be collected now: autograd would add up in the dtype of the
        leaf, or to a gradient that the user does not hold."""
        other = self.spec.dtype is not self.sharded_param.dtype
        return (other or self._shown is not None) and self.has_grads()

    def collect(self) -> None:
        """Adds the gradients up, in the dtype of the sharded parameter."""
        pending, complete = self.pop_grads()
        axes, coordinate = self.pending_axes(), self.spec.mesh.coordinate or ()
        total = pending
        if complete is not None:  # the first rank contributes it
            if any(coordinate[a] for a in axes):
                total = self.zeros() if total is None else total
            else:
                total = complete if total is None else total + complete
        if total is not None:
            self._sum = axes, total.to(self.sharded_param.dtype)

    def waiting(self) -> DistTensor | None:
        """Returns ``p.grad`` between the backwards of an accumulation, if a gradient waits: the
        pending sum, laid out as ``unsharded_param``, with the gradient of ``sharded_param``."""
        if current_backward() != -1 or not self.has_grads():
            return None
        self.collect()
        assert self._sum is not None
        axes, total = self._sum
        if self.axis is not None and self.axis not in axes:  # complete over ``axis``: cut now
            self._sum, accumulated = None, self._accumulated
            self.accumulate_grad(self.own_piece(total).clone(), axes)
            self._accumulated = accumulated  # hooks are called after the last micro-batch
            return None
        coordinate = self.spec.mesh.coordinate or ()
        for own, leaf in leaves_of(self.sharded_param) if self.is_copy else ():
            if leaf.grad is not None and set(own) <= set(axes):
                if not any(coordinate[a] for a in axes if a not in own and a != self.axis):
                    self.own_piece(total).add_(leaf.grad)
                leaf.grad = None
        if self._shown is None or self._shown.local is not total:
            spec = grad_spec(self.unsharded_param, axes)
            self._shown = wrap(total, spec.with_dtype(total.dtype))
        return self._shown

    def drop(self) -> None:
        """Drops the gradients collected so far."""
        self._sum = self._shown = None
        self._accumulated = False
        for _, leaf in self.grad_leaves():
            leaf.grad = None

    def zeros(self) -> Tensor:
        spec = self.spec
        return torch.zeros(spec.local_shape, dtype=spec.dtype, device=self.sharded_param.device)

    def pop_pieces(self) -> list[tuple[Axes, Tensor]]:
        """Returns the gradients of ``grad_leaves``, and drops them."""
        pieces = [] if self._sum is None else [self._sum]
        pieces += [(axes, leaf.grad) for axes, leaf in self.grad_leaves() if leaf.grad is not None]
        self.drop()
        return pieces

    def pop_grads(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns (contribution of this rank, to be summed over ``pending_axes()``; complete
        gradient of uses that did not vary), and drops them. None: this rank has none."""
        union, coordinate = self.pending_axes(), self.spec.mesh.coordinate or ()
        pending: Tensor | None = None
        complete: Tensor | None = None
        contributes = False
        uses = [(axes, leaf.grad) for axes, leaf in self.grad_leaves()]
        for _, leaf in self.grad_leaves():
            leaf.grad = None
        kept, self._sum = self._sum, None
        for axes, grad in uses if kept is None else [kept, *uses]:
            if grad is None:
                continue
            if not any(self.spec.mesh.shape[a] > 1 for a in axes):
                complete = grad if complete is None else _add(complete, grad, kept)
                continue
            contributes = True
            # Over an axis on which it is complete, the first rank contributes it.
            if not any(coordinate[a] for a in union if a not in axes):
                pending = grad if pending is None else _add(pending, grad, kept)
        if contributes and pending is None:
            pending = self.zeros()
        return pending, complete

    def gradient(self, pieces: list[tuple[Axes, Tensor]]) -> DistTensor:
        """Returns the gradient of ``sharded_param`` for gradients of ``grad_leaves``: a shard in
        the graph, pending over the axes that do not split it."""
        whole = self.unsharded_param
        grad: Any = as_gradient(whole, *combine_gradients(whole, pieces)).to(
            self.sharded_param.dtype
        )
        partial = tuple((a, op) for a, op in grad.spec.layout.partial if a != self.axis)
        return resharded(
            grad, grad.spec.with_layout(Layout(self.sharded_param.spec.layout.dims, partial))
        )

    def accumulate_in_graph(self, grad: DistTensor) -> None:
        """Adds ``grad``, with its graph, to the gradient of the parameter."""
        earlier = get_grad(self.sharded_param)
        set_grad(self.sharded_param, grad if earlier is None else earlier + grad)
        self._accumulated = True

    def own_piece(self, grad: Tensor) -> Tensor:
        """Returns this rank's piece of a gradient of ``unsharded_param`` as a view."""
        mesh = self.spec.mesh
        if self.axis is None or mesh.coordinate is None:
            return grad
        piece = chunk_of(self.rows(grad), mesh.shape[self.axis], mesh.coordinate[self.axis])
        return self.from_rows(piece)

    def rows(self, x: Tensor) -> Tensor:
        """Returns a view of ``x`` with the dim that ``axis`` splits as dim 0, for a bucket."""
        return x.movedim(self.dim, 0) if self.dim else x

    def from_rows(self, x: Tensor) -> Tensor:
        return x.movedim(0, self.dim) if self.dim else x

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape of ``rows`` of the local of ``unsharded_param``."""
        shape, d = tuple(self.spec.local_shape), self.dim
        return (*shape[d : d + 1], *shape[:d], *shape[d + 1 :])

    # Gradients of ``sharded_param`` ---------------------------------------------------------------

    def pop_partial(self, axes: Axes) -> Tensor | None:
        """Removes and returns the parameter's gradient that is to be summed over ``axes``: the sum
        of earlier micro-batches."""
        for own, leaf in leaves_of(self.sharded_param):
            if own == axes:
                grad, leaf.grad = leaf.grad, None
                shown = shown_grad(self.sharded_param)
                if shown is not None and shown.local is grad:
                    self._shown = shown
                return grad
        return None

    def accumulate_grad(self, grad: Tensor, axes: Axes) -> None:
        """Adds ``grad``, to be summed over ``axes``, to the gradient of the parameter."""
        self._accumulated = True
        if self.all_reduce_hook is not None and not axes:
            self.all_reduce_hook(grad)
        grad = grad.to(self.sharded_param.dtype)
        if self.dim:  # the strides of a contiguous tensor, also where the piece has one column
            grad = grad.contiguous().flatten().view(grad.shape)
        leaf = self.sharded_param.local
        if not axes and leaf.grad is None:
            leaf.grad = grad
        else:
            for own, leaf in leaves_of(self.sharded_param):
                if own == axes and leaf.grad is not None:
                    leaf.grad.add_(grad)
                    break
            else:
                keep_grad(self.sharded_param, axes, grad)
        shown, self._shown = self._shown, None
        if shown is not None:  # the user may hold this ``p.grad``: update it
            now: Any = get_grad(self.sharded_param)
            shown.local, shown.spec = now.local, now.spec
            remember_grad(self.sharded_param, shown, made=True)

    def pop_accumulated(self) -> bool:
        """Returns True if a gradient was accumulated since the last call."""
        accumulated, self._accumulated = self._accumulated, False
        return accumulated


def _add(total: Tensor, grad: Tensor, kept: tuple[Axes, Tensor] | None) -> Tensor:
    """Returns the sum of both, in place if ``total`` is the tensor in ``kept``."""
    return total.add_(grad) if kept is not None and total is kept[1] else total + grad


def is_borrowed(params: Iterable[FSDPParam], module: nn.Module) -> bool:
    """Returns True if ``module`` has hooks before its forward and several modules use one of these
    parameters: such a hook may bring it to the mesh of another stage."""
    return bool(module._forward_pre_hooks) and any(len(p.slots) > 1 for p in params)
