"""GradSlot: the gradient of a tensor as its user sees it, and its memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from disttensor.core.layout import Axes
from disttensor.tensor.uses import add_leaf, leaves_of

Tensor = torch.Tensor

# id -> the tensors whose gradient was shown, see ``disttensor.tensor.grad.update_shown``
SHOWN: dict[int, weakref.ref[Any]] = {}


class GradCollector(Protocol):
    """Collects the gradients of a leaf on other tensors, and brings them to the leaf: see
    ``disttensor.gradients.accumulate``; ``disttensor.fsdp.param`` adds ``feature``, ``renew``."""

    feature: str  # its name in errors
    hooks: OrderedDict[int, Callable[[Any], Any]]  # called when the leaf has its gradient

    def grad_leaves(self) -> list[tuple[Axes, Tensor]]: ...
    def gradient(self, pieces: list[tuple[Axes, Tensor]]) -> Any: ...  # of the leaf, in the graph
    def waiting(self) -> Any: ...  # the collected gradient before its reduction, or None
    def drop(self) -> None: ...
    def renew(self) -> None: ...


class GradSlot:
    """grad       the last result of ``.grad``.
    owner      of a gradient: a weak reference to the leaf whose gradient this is.
    collector  collects the gradients of this leaf on other tensors.
    fixed_by   the feature that relies on the leaf's layout and dtype.
    memory     the persistent memory of its gradient: ``disttensor.gradients.memory``.
    bucket     equal for leaves whose gradients are reduced together, during the backward.
    hooks      of a leaf: see ``disttensor.tensor.leaf_hooks``.
    replaced   weak references to its leaves of an earlier layout, which refuse gradients.
    """

    grad: Any = None
    owner: weakref.ref[Any] | None = None
    collector: GradCollector | None = None
    fixed_by: str = ""
    memory: Any = None
    bucket: object = None
    hooks: Any = None

    def __init__(self) -> None:
        self.replaced: list[tuple[Axes, weakref.ref[Tensor]]] = []

    def older_leaves(self) -> list[tuple[Axes, Tensor]]:
        """Returns the replaced leaves that a graph still has."""
        return [(axes, leaf) for axes, ref in self.replaced if (leaf := ref()) is not None]


def grad_slot(x: Any) -> GradSlot:
    """Returns the GradSlot of x, which it makes if there is none."""
    slot: GradSlot | None = x._grad_slot
    if slot is None:
        slot = x._grad_slot = GradSlot()
    return slot


def keep_grad(x: Any, axes: Axes, g: Tensor) -> None:
    """Sets ``g`` as the gradient that was collected for uses varying over ``axes``."""
    add_leaf(x, axes).grad = g


def drop_grads(x: Any) -> None:
    """Drops all collected gradients of x."""
    x.local.grad = None
    if x._uses is not None:
        for _, leaf in leaves_of(x)[1:]:
            leaf.grad = None


def shown_grad(x: Any) -> Any:
    """Returns the last result of ``x.grad``, or None."""
    slot: GradSlot | None = x._grad_slot
    return None if slot is None else slot.grad


def remember_grad(x: Any, g: Any) -> None:
    """Stores ``g`` as the result of ``x.grad``: a reduction of ``g`` also reduces the gradient of
    x."""
    if g is not None:
        SHOWN[id(x)] = grad_slot(g).owner = weakref.ref(x)
    if g is not None or x._grad_slot is not None:
        grad_slot(x).grad = g


def set_collector(x: Any, collector: GradCollector) -> None:
    grad_slot(x).collector = collector


def collector_of(x: Any) -> GradCollector | None:
    slot: GradSlot | None = x._grad_slot
    return None if slot is None else slot.collector


def bucket_of(x: Any) -> object:
    slot: GradSlot | None = x._grad_slot
    return None if slot is None else slot.bucket


def fix_spec(x: Any, feature: str) -> None:
    """Makes ``p.data = value`` require the layout and the dtype of x, for ``feature``."""
    grad_slot(x).fixed_by = feature
