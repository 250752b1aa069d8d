"""A parameter in its two states: sharded between steps, unsharded while it is used.

``sharded_param`` is what the module, the optimizer and a checkpoint see: a DistTensor that the
shard axis splits. During a forward or backward of its segment the module holds ``unsharded_param``
instead: not split by that axis, in the dtype of the computation, and a leaf, so its gradients
collect as on any leaf, by the axes over which uses vary (``DistTensor.local_for``). What comes of
them is added to the gradient of ``sharded_param``. If nothing is split or cast, both are one.
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
from disttensor.tensor.base import (
    as_parameter,
    count_leaves,
    fix_spec,
    grad_leaves,
    keep_grad,
    remember_grad,
    set_collector,
)  # fmt: skip
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import as_gradient, combined, get_grad, grad_spec, set_grad
from disttensor.tensor.reshard import resharded
from disttensor.tensor.versions import counts_twice, version
from disttensor.torch_private import current_backward

Tensor = torch.Tensor


class FSDPParam:
    """axis: splits dim ``dim`` of ``sharded_param``, None if none does. spec: of
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
            spec = spec.with_layout(Layout(rest, spec.layout.partial, spec.layout.own))
        self.spec = spec.with_dtype(dtype)
        self.unsharded_param: DistTensor = param
        self._times_renewed = 0  # how often ``p.data = x`` has been done
        # gradients so far, in the dtype of the sharded parameter, to be summed over these axes
        self._sum: tuple[Axes, Tensor] | None = None
        self._shown: DistTensor | None = None  # what waits, as ``p.grad`` has given it
        self._hooked = 0  # how many leaves ``new_leaves`` has given
        self._axes: Axes = ()
        self._leaves_seen: list[Axes] = []  # when ``_axes`` was computed
        # of users, after accumulation
        self.hooks: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
        self._accumulated = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPParam:
        param, slots = deepcopy((self.sharded_param, self.slots), memo)
        new = memo[id(self)] = FSDPParam(
            self.name, param, slots, self.axis, self.spec.dtype, self.reduce_dtype
        )
        if self.is_copy and not param.is_initialized:
            new.set_unsharded(deepcopy(self.unsharded_param, memo))
        return new

    @property
    def is_copy(self) -> bool:
        return self.unsharded_param is not self.sharded_param

    def set_unsharded(self, param: DistTensor) -> None:
        self.unsharded_param = as_parameter(param)
        token.replaced[0] += 1  # modules will show another tensor

    def use_memory(self, memory: Tensor) -> None:
        """``memory`` is the local of ``unsharded_param`` from now on."""
        leaf = memory.detach().requires_grad_(self.sharded_param.requires_grad)
        self.set_unsharded(wrap(leaf, self.spec))
        set_collector(self.sharded_param, self)

    def show_unsharded(self) -> None:
        requires_grad = self.sharded_param.local.requires_grad
        if self.unsharded_param.local.requires_grad is not requires_grad:
            self.unsharded_param.requires_grad_(requires_grad)
        self._swap(self.sharded_param, self.unsharded_param)

    def show_sharded(self) -> None:
        self._swap(self.unsharded_param, self.sharded_param)

    def _swap(self, old: DistTensor, new: DistTensor) -> None:
        """The modules hold ``new`` in place of ``old``, unless somebody has put another tensor
        there. It bypasses the guards of skipped modules, which must not see it: the table is that
        of the owner now, as a guard may have replaced ``slot.table``."""
        for slot in self.slots:
            table: Any = slot.owner._parameters
            if table.get(slot.key) is old:
                dict.__setitem__(table, slot.key, new)

    def renew(self) -> None:
        """``p.data = x`` has been done."""
        self._times_renewed += 1

    def version(self) -> tuple[int, int]:
        """Changes with each counted write to ``sharded_param``, on ranks without a row too."""
        return version(self.sharded_param.local), self._times_renewed

    def is_written_unseen(self) -> bool:
        """Returns True if writes to ``sharded_param`` may not be counted, as after ``p.data = y``
        writes to y."""
        return counts_twice(self.sharded_param.local)

    # Gradients of ``unsharded_param`` -------------------------------------------------------------

    def grad_leaves(self) -> list[tuple[Axes, Tensor]]:
        """(axes over which the uses vary, leaf that collects their gradient), without the leaf of
        ``sharded_param`` itself: its gradient is complete."""
        return [use for use in grad_leaves(self.unsharded_param) if self.is_copy or use[0]]

    def new_leaves(self) -> list[Tensor]:
        """The leaves that have come since the last call, that of ``sharded_param`` with them."""
        if not self.unsharded_param.local.requires_grad:
            return []
        if count_leaves(self.unsharded_param) == self._hooked:  # most often
            return []
        leaves = [leaf for _, leaf in grad_leaves(self.unsharded_param)]
        new, self._hooked = leaves[self._hooked :], len(leaves)
        return new

    def pending_axes(self) -> Axes:
        """The axes over which the gradient is to be summed: some use varied. Known on all ranks."""
        varying = [axes for axes, _ in grad_leaves(self.unsharded_param)]
        if varying != self._leaves_seen:
            shape = self.spec.mesh.shape
            found = {a for axes in varying for a in axes if shape[a] > 1}
            self._leaves_seen, self._axes = varying, tuple(sorted(found))
        return self._axes

    @cached_property
    def divisible(self) -> bool:
        """Do all ranks have locals of one size? Others get a bucket of their own: the order in
        which a backend sums depends on the offset, and replicas must get the same bits."""
        return self.spec.is_even()

    def has_grads(self) -> bool:
        return self._sum is not None or any(leaf.grad is not None for _, leaf in self.grad_leaves())

    @property
    def collects(self) -> bool:
        """Must a gradient that waits be collected? Autograd adds up in the dtype of the leaf, and
        where nobody looks."""
        other = self.spec.dtype is not self.sharded_param.dtype
        return (other or self._shown is not None) and self.has_grads()

    def collect(self) -> None:
        """Add the gradients so far up, in the dtype of the sharded parameter."""
        pending, complete = self.pop_grads()
        axes, coordinate = self.pending_axes(), self.spec.mesh.coordinate or ()
        total = pending
        if complete is not None:  # the first rank brings it in
            if any(coordinate[a] for a in axes):
                total = self.zeros() if total is None else total
            else:
                total = complete if total is None else total + complete
        if total is not None:
            self._sum = axes, total.to(self.sharded_param.dtype)

    def waiting(self) -> DistTensor | None:
        """``p.grad`` between the backwards of an accumulation, if a gradient waits: the sum so far,
        laid out as ``unsharded_param``, and pending. What ``sharded_param`` had is in it."""
        if current_backward() != -1 or not self.has_grads():
            return None
        self.collect()
        assert self._sum is not None
        axes, total = self._sum
        if self.axis is not None and self.axis not in axes:  # nothing to wait for: it is cut now
            self._sum, accumulated = None, self._accumulated
            self.accumulate_grad(self.own_piece(total).clone(), axes)
            self._accumulated = accumulated  # hooks are called after the last micro-batch
            return None
        coordinate = self.spec.mesh.coordinate or ()
        for own, leaf in grad_leaves(self.sharded_param) if self.is_copy else ():
            if leaf.grad is not None and set(own) <= set(axes):
                if not any(coordinate[a] for a in axes if a not in own and a != self.axis):
                    self.own_piece(total).add_(leaf.grad)
                leaf.grad = None
        if self._shown is None or self._shown.local is not total:
            spec = grad_spec(self.unsharded_param, axes)
            self._shown = wrap(total, spec.with_dtype(total.dtype))
        return self._shown

    def drop(self) -> None:
        """Forget the gradients so far."""
        self._sum = self._shown = None
        self._accumulated = False
        for _, leaf in self.grad_leaves():
            leaf.grad = None

    def zeros(self) -> Tensor:
        spec = self.spec
        return torch.zeros(spec.local_shape, dtype=spec.dtype, device=self.sharded_param.device)

    def pop_pieces(self) -> list[tuple[Axes, Tensor]]:
        """The gradients of ``grad_leaves``, and forget them."""
        pieces = [] if self._sum is None else [self._sum]
        pieces += [(axes, leaf.grad) for axes, leaf in self.grad_leaves() if leaf.grad is not None]
        self.drop()
        return pieces

    def pop_grads(self) -> tuple[Tensor | None, Tensor | None]:
        """(contribution of this rank, still to be summed over ``pending_axes()``; complete gradient
        of uses that did not vary), and forget them. None: this rank has none."""
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
            # On an axis over which it is complete already, the first rank contributes it.
            if not any(coordinate[a] for a in union if a not in axes):
                pending = grad if pending is None else _add(pending, grad, kept)
        if contributes and pending is None:
            pending = self.zeros()
        return pending, complete

    def gradient(self, pieces: list[tuple[Axes, Tensor]]) -> DistTensor:
        """The gradient of ``sharded_param`` that gradients of ``grad_leaves`` come to: a shard, in
        the graph, and pending over the axes that do not split it."""
        whole = self.unsharded_param
        grad: Any = as_gradient(whole, *combined(whole, pieces)).to(self.sharded_param.dtype)
        partial = tuple((a, op) for a, op in grad.spec.layout.partial if a != self.axis)
        return resharded(
            grad, grad.spec.with_layout(Layout(self.sharded_param.spec.layout.dims, partial))
        )

    def accumulate_in_graph(self, grad: DistTensor) -> None:
        """Add ``grad``, which is to be differentiated, to the gradient of the parameter."""
        earlier = get_grad(self.sharded_param)
        set_grad(self.sharded_param, grad if earlier is None else earlier + grad)
        self._accumulated = True

    def own_piece(self, grad: Tensor) -> Tensor:
        """This rank's piece of a gradient of ``unsharded_param``: a view."""
        mesh = self.spec.mesh
        if self.axis is None or mesh.coordinate is None:
            return grad
        piece = chunk_of(self.rows(grad), mesh.shape[self.axis], mesh.coordinate[self.axis])
        return self.from_rows(piece)

    def rows(self, x: Tensor) -> Tensor:
        """A view of ``x`` whose dim 0 is the one that ``axis`` splits, as a bucket cuts it."""
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
        """The sum of earlier micro-batches on the parameter, still to be summed over ``axes``."""
        for own, leaf in grad_leaves(self.sharded_param):
            if own == axes:
                grad, leaf.grad = leaf.grad, None
                state = self.sharded_param._grad_state
                if state is not None and state.grad is not None and state.grad.local is grad:
                    self._shown = state.grad
                return grad
        return None

    def accumulate_grad(self, grad: Tensor, axes: Axes) -> None:
        """Add ``grad``, still to be summed over ``axes``, to the gradient of the parameter."""
        self._accumulated = True
        grad = grad.to(self.sharded_param.dtype)
        grad = grad.contiguous() if self.dim else grad
        leaf = self.sharded_param.local
        if not axes and leaf.grad is None:
            leaf.grad = grad
        else:
            for own, leaf in grad_leaves(self.sharded_param):
                if own == axes and leaf.grad is not None:
                    leaf.grad.add_(grad)
                    break
            else:
                keep_grad(self.sharded_param, axes, grad)
        shown, self._shown = self._shown, None
        if shown is not None:  # whoever has asked for ``p.grad`` holds the gradient still
            now: Any = get_grad(self.sharded_param)
            shown.local, shown.spec = now.local, now.spec
            remember_grad(self.sharded_param, shown, made=True)

    def pop_accumulated(self) -> bool:
        """Returns True if a gradient was accumulated since the last call."""
        accumulated, self._accumulated = self._accumulated, False
        return accumulated


def _add(total: Tensor, grad: Tensor, kept: tuple[Axes, Tensor] | None) -> Tensor:
    """The sum of both; in place in what was ``kept`` for that."""
    return total.add_(grad) if kept is not None and total is kept[1] else total + grad


def shared(params: Iterable[FSDPParam], module: nn.Module) -> bool:
    """Is one of these parameters that several modules have read by the hooks of ``module``, ahead
    of its forward? One that lies on the mesh of another stage is brought so."""
    return bool(module._forward_pre_hooks) and any(len(p.slots) > 1 for p in params)
