"""A parameter between steps and while it is in use.

``held`` is what the module, the optimizer and a checkpoint see: a DistTensor, cut over the shard
axis. ``whole`` is its twin while a forward or a backward of its segment runs: not cut over that
axis, in the dtype of the computation. The twin is a leaf, so its gradients collect on it as on any
leaf, by the axes over which uses vary (``DistTensor.local_for``); what comes of them is added to
the gradient of ``held``. Where nothing is cut or cast both are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from disttensor.fsdp.bucket import piece
from disttensor.layout import Axes, Layout
from disttensor.nn.parameters import Slot
from disttensor.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.gradient import keep, uses
from disttensor.tree import substitute

Tensor = torch.Tensor


def uncut(spec: DistSpec, axis: int | None) -> DistSpec:
    """``spec`` without the split of dim 0 by ``axis``, which is the minor one there."""
    layout = spec.layout
    if axis is None or axis not in layout.sharded:
        return spec
    dims = (tuple(a for a in layout.dims[0] if a != axis), *layout.dims[1:])
    return spec.with_layout(Layout(dims, layout.partial, layout.own))


class Twin:
    """One parameter and its twin.

    axis    the mesh axis that cuts ``held``; None where nothing does
    """

    def __init__(
        self, name: str, held: DistTensor, slots: list[Slot], axis: int | None, dtype: torch.dtype
    ) -> None:
        self.name, self.held, self.slots = name, held, slots
        mesh = held.spec.mesh
        cut = axis is not None and axis in held.spec.layout.sharded and mesh.shape[axis] > 1
        self.axis = axis if cut else None
        self.spec = uncut(held.spec, self.axis).with_dtype(dtype)
        self.whole: DistTensor = held
        self._data: Tensor | None = None
        self._renewed = 0  # how often ``held`` was given other memory
        self._kept: dict[Axes, Tensor] = {}  # gradients in another dtype than autograd adds in
        self._hooked = 0
        self._axes: Axes = ()
        self._seen: list[Axes] = []  # the ways there were when these were last put together
        # Of users: called when ``held`` has its gradient.
        self.hooks: dict[int, Callable[[Any], Any]] = {}
        self._given = False

    @property
    def apart(self) -> bool:
        return self.whole is not self.held

    def be(self, local: Tensor) -> None:
        """``local`` is the memory of the twin from now on."""
        leaf = local.detach().requires_grad_(self.held.requires_grad)
        self.whole = wrap(leaf, self.spec)
        self.whole._is_param = True
        self.held._twin = self

    def swap(self, old: DistTensor, new: DistTensor) -> None:
        """The modules hold ``new`` in place of ``old``, unless somebody has put another tensor
        there. Nobody is told: for those who look from outside nothing changes."""
        for slot in self.slots:
            table: Any = (
                slot.owner._parameters
            )  # not slot.table: one that is watched takes its place
            if table.get(slot.key) is old:
                dict.__setitem__(table, slot.key, new)

    def follow(self) -> None:
        """The twin requires grad where the parameter does."""
        if self.whole.local.requires_grad is not self.held.local.requires_grad:
            self.whole.requires_grad_(self.held.local.requires_grad)

    # What leaves no trace in autograd -------------------------------------------------------------

    def data(self) -> Tensor:
        """``p.data``: always one tensor, by whose version a write to it is seen."""
        if self._data is None:
            self._data = self.held.local.data
        return self._data.detach()

    def renew(self) -> None:
        """``p.data = x`` has been done."""
        self._data = None
        self._renewed += 1

    def writes(self) -> tuple[int, int]:
        return self._renewed, 0 if self._data is None else self._data._version

    # Gradients on the twin ------------------------------------------------------------------------

    def ways(self) -> list[tuple[Axes, Tensor]]:
        """The leaves on which gradients collect; without the one of ``held`` itself, whose gradient
        is there already."""
        return [way for way in uses(self.whole) if self.apart or way[0]]

    def new_leaves(self) -> list[Tensor]:
        """Leaves that appeared since the last call."""
        if not self.whole.local.requires_grad:
            return []
        leaves = [leaf for _, leaf in self.ways()]
        new, self._hooked = leaves[self._hooked :], len(leaves)
        return new

    def axes(self) -> Axes:
        """The mesh axes over which some use varied: the gradient is a sum of contributions there.
        Known on all ranks."""
        ways = [axes for axes, _ in uses(self.whole)]
        if ways != self._seen:
            shape = self.spec.mesh.shape
            found = {a for axes in ways for a in axes if shape[a] > 1}
            self._seen, self._axes = ways, tuple(sorted(found))
        return self._axes

    @cached_property
    def even(self) -> bool:
        """Are all ranks' locals of one size? Else it does not share a wire with those that are: the
        order in which a backend adds hangs on where a number lies, and ranks that hold the same
        number should get the same bits."""
        first = self.spec.box_at((0,) * self.spec.mesh.ndim)[1]
        return first == self.spec.box_at(tuple(n - 1 for n in self.spec.mesh.shape))[1]

    def collected(self) -> bool:
        return bool(self._kept) or any(leaf.grad is not None for _, leaf in self.ways())

    def lay_by(self, dtype: torch.dtype) -> None:
        """Add what has collected to a sum in ``dtype``, which is wider than the twin's."""
        for axes, leaf in self.ways():
            if leaf.grad is not None:
                grad, leaf.grad = leaf.grad, None
                kept = self._kept.get(axes)
                self._kept[axes] = grad.to(dtype) if kept is None else kept.add_(grad)

    def drop(self) -> None:
        """Forget what has collected."""
        self._kept.clear()
        for _, leaf in self.ways():
            leaf.grad = None

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """(contributions, still to be summed over ``axes()``; the whole gradient of uses that did
        not vary), and forget them. None: there is none on this rank."""
        union, coordinate = self.axes(), self.spec.mesh.coordinate or ()
        pending: Tensor | None = None
        complete: Tensor | None = None
        came = False
        for axes, leaf in self.ways():
            grad, kept = leaf.grad, self._kept.pop(axes, None)
            leaf.grad = None
            if grad is None or kept is None:
                grad = kept if grad is None else grad
            else:
                grad = kept.add_(grad)
            if grad is None:
                continue
            if grad.requires_grad:
                raise RuntimeError(
                    f"{self.name}: backward(create_graph=True) through a module under "
                    "shard_data_parallel is not supported: the gradient of a shard has no graph. "
                    "Differentiate twice before the module is sharded"
                )
            if not any(self.spec.mesh.shape[a] > 1 for a in axes):
                complete = grad if complete is None else complete + grad
                continue
            came = True
            # Where it is whole already, it is the share of the first rank.
            if not any(coordinate[a] for a in union if a not in axes):
                pending = grad if pending is None else pending + grad
        if came and pending is None:
            pending = torch.zeros(
                self.spec.local_shape, dtype=self.spec.dtype, device=self.held.device
            )
        return pending, complete

    def tell(self) -> None:
        """Call the hooks, if a gradient was given since the last call."""
        given, self._given = self._given, False
        for hook in list(self.hooks.values()) if given else ():
            hook(self.held)

    # Gradients of the parameter -------------------------------------------------------------------

    def stashed(self, axes: Axes) -> Tensor | None:
        """The partial sums over ``axes`` that earlier micro-batches left on the parameter; no
        longer there after."""
        for own, leaf in uses(self.held):
            if own == axes:
                grad, leaf.grad = leaf.grad, None
                return grad
        return None

    def give(self, grad: Tensor, axes: Axes) -> None:
        """Add ``grad``, still to be summed over ``axes``, to the gradient of the parameter."""
        self._given = True
        grad = grad.to(self.held.dtype)
        leaf = self.held.local
        if not axes and leaf.grad is None:
            leaf.grad = grad
            return
        for own, leaf in uses(self.held):
            if own == axes and leaf.grad is not None:
                leaf.grad.add_(grad)
                return
        keep(self.held, axes, grad)


def piece_of(twin: Twin, grad: Tensor) -> Tensor:
    """This rank's piece of a whole gradient."""
    mesh = twin.spec.mesh
    if twin.axis is None or mesh.coordinate is None:
        return grad
    return piece(grad, mesh.shape[twin.axis], mesh.coordinate[twin.axis])


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Arguments of a module as its twins compute with them."""
    return substitute(values, lambda x: x.to(dtype) if x.is_floating_point() else x)
