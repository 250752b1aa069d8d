"""The gradient of a parameter that is used as another tensor: gradients of the uses add up, and
their reduction is added to the gradient of the parameter.

    unsharded_param   used by the forwards. Its leaves collect gradients by the axes over which
                      uses vary (``DistTensor.local_for``).
    sharded_param     read by the optimizer. ``axis`` splits its dim ``dim``, or it has another
                      dtype; if neither, both are one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from disttensor.core.layout import Axes, Layout
from disttensor.core.spec import DistSpec
from disttensor.gradients.rows import chunk_of
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad import as_gradient, combine_gradients, get_grad, grad_spec, set_grad
from disttensor.tensor.grad_slot import keep_grad, remember_grad, shown_grad
from disttensor.tensor.reshard import resharded
from disttensor.tensor.uses import count_leaves, invalidate, leaves_of
from disttensor.torch_private import current_backward

Tensor = torch.Tensor


class GradAccumulator:
    """spec: of ``unsharded_param``. reduce_dtype: of sums between ranks."""

    unsharded_param: DistTensor

    def __init__(
        self, name: str, param: DistTensor, spec: DistSpec, axis: int | None, dim: int,
        reduce_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.name, self.sharded_param, self.unsharded_param = name, param, param
        self.spec, self.axis, self.dim, self.reduce_dtype = spec, axis, dim, reduce_dtype
        # gradients so far, in the dtype of the sharded parameter, to be summed over these axes
        self._sum: tuple[Axes, Tensor] | None = None
        self._shown: DistTensor | None = None  # the last ``p.grad`` of a gradient that waits
        self._hooked = 0  # number of leaves that ``new_leaves`` has returned
        self._axes: Axes = ()
        self._leaves_seen: list[Axes] = []  # when ``_axes`` was computed
        # of users, after accumulation
        self.hooks: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
        self._accumulated = False
        self.all_reduce_hook: Callable[[Tensor], Any] | None = None  # changes complete gradients

    @property
    def is_copy(self) -> bool:
        return self.unsharded_param is not self.sharded_param

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
        own, pieces, axes = self._sum, self.pop_pieces(), self.pending_axes()
        total = self._contribution(pieces, axes, own)
        if total is not None:
            self._sum = axes, total.to(self.sharded_param.dtype)

    def waiting(self) -> DistTensor | None:
        """Returns ``p.grad`` between the backwards of an accumulation, if a gradient waits: the
        pending sum, laid out as ``unsharded_param``, with the gradient of ``sharded_param``. It may
        move the gradient to leaves of ``sharded_param``, and returns None then."""
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
                self._take_shown(leaf.grad)
                leaf.grad = None
        spec = grad_spec(self.unsharded_param, axes).with_dtype(total.dtype)
        if self._shown is None:
            self._shown = wrap(total, spec)
        elif self._shown.local is not total:
            self._shown.local, self._shown.spec = total, spec
            invalidate(self._shown)
        return self._shown

    def _take_shown(self, grad: Tensor | None) -> None:
        """Lets the last ``p.grad`` show what becomes of ``grad``, if it shows this gradient: the
        user may hold it."""
        shown = shown_grad(self.sharded_param)
        if grad is not None and shown is not None and shown.local is grad:
            self._shown = shown

    def drop(self) -> None:
        """Drops the gradients collected so far."""
        self.pop_pieces()
        self._shown, self._accumulated = None, False

    def zeros(self) -> Tensor:
        spec = self.spec
        return torch.zeros(spec.local_shape, dtype=spec.dtype, device=self.sharded_param.device)

    def pop_pieces(self) -> list[tuple[Axes, Tensor]]:
        """Returns the gradients collected so far with the axes over which they are to be summed,
        and drops them."""
        leaves = self.grad_leaves()
        pieces = [] if self._sum is None else [self._sum]
        pieces += [(axes, leaf.grad) for axes, leaf in leaves if leaf.grad is not None]
        self._sum = None
        for _, leaf in leaves:
            leaf.grad = None
        return pieces

    def pop_grads(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns (contribution of this rank, to be summed over ``pending_axes()``; complete
        gradient of uses that did not vary), and drops them. None: this rank has none."""
        own, shape = self._sum, self.spec.mesh.shape
        pieces = self.pop_pieces()
        for _, grad in pieces:
            self._take_shown(grad)
        pending = [piece for piece in pieces if any(shape[a] > 1 for a in piece[0])]
        complete = [piece for piece in pieces if all(shape[a] == 1 for a in piece[0])]
        axes = self.pending_axes()
        return self._contribution(pending, axes, own), self._contribution(complete, (), own)

    def _contribution(
        self, pieces: list[tuple[Axes, Tensor]], over: Axes, own: tuple[Axes, Tensor] | None
    ) -> Tensor | None:
        """Returns this rank's part of a sum over the axes ``over``, in place if it begins with
        ``own``. The first rank contributes a gradient that is complete on some of these axes."""
        coordinate = self.spec.mesh.coordinate or ()
        total = None
        for axes, grad in pieces:
            if any(coordinate[a] for a in over if a not in axes):
                continue
            in_place = own is not None and total is own[1]
            total = grad if total is None else total.add_(grad) if in_place else total + grad
        return self.zeros() if pieces and total is None else total

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

    def pop_partial(self, axes: Axes) -> Tensor | None:
        """Removes and returns the parameter's gradient that is to be summed over ``axes``: the sum
        of earlier micro-batches."""
        for own, leaf in leaves_of(self.sharded_param):
            if own == axes:
                grad, leaf.grad = leaf.grad, None
                self._take_shown(grad)
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
            invalidate(shown)
            remember_grad(self.sharded_param, shown)

    def pop_accumulated(self) -> bool:
        """Returns True if a gradient was accumulated since the last call."""
        accumulated, self._accumulated = self._accumulated, False
        return accumulated
