"""What every part of DistTensor is written against: this rank's piece, the spec, and the leaves on
which gradients collect.

``DistTensor`` (``dist_tensor.py``) puts the parts together; a part makes another tensor of its kind
with ``like``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch

from disttensor.autograd.activation_checkpoint import region
from disttensor.autograd.grad_types import along, way, whole_grad
from disttensor.comm.places import Place
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.tensor.versions import INFERENCE, UNCOUNTED, count
from disttensor.tensor.views import ViewState, invalidate
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
T = TypeVar("T", bound="MeshTensor")


class GradCollector(Protocol):
    """Collects the gradients of a leaf on tensors of its own, and brings them to the leaf (see
    ``disttensor.fsdp.param``)."""

    feature: str  # whose it is, for errors
    hooks: OrderedDict[int, Callable[[Any], Any]]  # called when the leaf has its gradient

    def grad_leaves(self) -> list[tuple[Axes, Tensor]]: ...
    def gradient(self, pieces: list[tuple[Axes, Tensor]]) -> Any: ...  # of the leaf, in the graph
    def waiting(self) -> Any: ...  # what has collected and is not reduced yet, a DistTensor or None
    def drop(self) -> None: ...
    def renew(self) -> None: ...


class GradState:
    """What gradients need beside the local. Made when first needed, by ``grad_state``; written in
    this module only.

    aliases    axes -> (the local as varying uses read it, writes by then; -1: any number; the
               region of activation checkpointing that it was made in)
    origin     makes an alias from what the tensor was made of: ``origin(axes)``
    former     aliases from before there were hooks, or of other regions
    hooked     a leaf whose hooks must see whole gradients
    grad       what ``.grad`` gave last
    owner      weak: the leaf whose gradient this tensor is
    collector  gathers the gradients of this leaf in its stead
    fixed_by   the feature that relies on the leaf's layout and dtype
    place      of its gradient, in memory that stays
    """

    aliases: dict[Axes, tuple[Tensor, int, Any]] | None = None
    origin: Callable[[Axes], Tensor] | None = None
    former: tuple[tuple[Axes, Tensor], ...] = ()
    hooked: bool = False
    grad: Any = None
    owner: weakref.ref[Any] | None = None
    collector: GradCollector | None = None
    fixed_by: str = ""
    place: Place | None = None


class MeshTensor(Tensor):
    """``local`` and ``spec``, and what is kept beside them, each with one owner: None until it is
    needed."""

    local: Tensor
    spec: DistSpec
    _grad_state: GradState | None = None  # disttensor.tensor.base
    _view_state: ViewState | None = None  # disttensor.tensor.views
    # torch's mark of an nn.Parameter: set by ``nn.Parameter`` and ``as_parameter``
    _is_param: bool = False
    # a pending value as an earlier call reduced it: disttensor.dispatch.reduction_cache
    _reduced: Any = None

    def like(self, local: Tensor, spec: DistSpec) -> Self:
        """Another tensor of this class."""
        out: Self = make_subclass(type(self), spec.meta_tensor)
        out.local = local
        out.spec = spec
        return out

    @property
    def is_initialized(self) -> bool:
        """False on a rank outside the mesh, which knows the metadata only."""
        return self.spec.mesh.coordinate is not None

    def local_for(self, axes: Axes) -> Tensor:
        """The local for a use that varies over ``axes`` (sorted; the value is replicated there).

        The value is ``local``'s; what differs is the meaning of its gradient: see
        ``disttensor.autograd.grad_types``.
        """
        state = self._grad_state
        if state is not None and state.aliases is not None:
            hit = state.aliases.get(axes)
            if hit is not None and (
                hit[1] < 0 or (hit[1] == self.local._version + UNCOUNTED[0] and hit[2] == region())
            ):
                return hit[0]
        local = self.local
        if not axes or not local.requires_grad or not torch.is_grad_enabled():
            return local
        state = state or grad_state(self)
        made_at = local._version + UNCOUNTED[0]
        if state.origin is not None:
            alias = state.origin(axes)
        # a second leaf: shares memory, collects its own .grad
        elif local.is_leaf and not state.hooked:
            alias, made_at = whole_grad(local.detach().requires_grad_(), self.spec), -1
        else:
            alias = along(local, way(self.spec, (), self.spec, axes), None)
        if state.aliases is None:
            state.aliases = {}
        elif axes in state.aliases and not local.is_leaf and state.origin is not None:
            state.former += ((axes, state.aliases[axes][0]),)  # of another region
        state.aliases[axes] = (alias, made_at, region())
        return alias

    def forget_uses(self) -> None:
        """After an in-place write: aliases made before are of the old value, and so are reductions
        and copies."""
        state = self._grad_state
        if state is not None:
            state.origin = None
            if not self.local.is_leaf:
                state.aliases = None
        self._reduced = None
        if INFERENCE and self.local.is_inference():
            count(self.local)
        invalidate(self.local)


def as_parameter(x: T) -> T:
    """``x`` itself is an ``nn.Parameter`` from now on; ``nn.Parameter(x)`` would be another
    tensor."""
    x._is_param = True
    return x


def grad_state(x: MeshTensor) -> GradState:
    state = x._grad_state
    if state is None:
        state = x._grad_state = GradState()
    return state


def place_of(x: MeshTensor) -> Place:
    """Where its gradient lies that is summed with others."""
    state = grad_state(x)
    if state.place is None:
        state.place = Place()
    return state.place


def from_origin(origin: Callable[[Axes], Tensor]) -> GradState:
    """The state of a new tensor whose aliases are made from what it was made of."""
    state = GradState()
    state.origin = origin
    return state


def grad_leaves(x: MeshTensor) -> list[tuple[Axes, Tensor]]:
    """The tensors in autograd's graph whose gradients sum to x's: the local, and one alias per set
    of varying axes.

    For a leaf the aliases are leaves too; else they were made from x's origin.
    """
    state = x._grad_state
    if state is None:
        return [((), x.local)]
    apart = not x.local.is_leaf and state.origin is not None
    made = state.aliases.items() if state.aliases is not None else ()
    aliases = [(axes, alias) for axes, (alias, made_at, _) in made if apart or made_at < 0]
    return [((), x.local), *aliases, *state.former]


def count_leaves(x: MeshTensor) -> int:
    """How many ``grad_leaves`` a leaf x without an origin has."""
    state = x._grad_state
    if state is None:
        return 1
    return 1 + len(state.former) + (len(state.aliases) if state.aliases is not None else 0)


def alias_leaves(x: MeshTensor) -> list[Tensor]:
    """The second leaves of a leaf x."""
    state = x._grad_state
    if state is None or state.aliases is None:
        return []
    return [alias for alias, made_at, _ in state.aliases.values() if made_at < 0]


def through(x: MeshTensor, dst: DistSpec, axes: Axes) -> Axes:
    """The axes over which a move to ``dst`` (used varying over ``axes``) reads this replicated
    value varying.

    A leaf that is cut collects the cut pieces as contributions, which costs nothing now.
    """
    spec, state = x.spec, x._grad_state
    leaf = x.local.is_leaf and (state is None or (not state.hooked and state.origin is None))
    cut = dst.layout.sharded if leaf else ()
    if not axes and not cut:
        return ()
    return tuple(
        [a for a in range(spec.mesh.ndim) if a not in spec.varies and (a in axes or a in cut)]
    )


def freeze_leaves(x: MeshTensor, hooked: bool = False) -> None:
    """From now on every use of x goes through its local (which has hooks); earlier ones are
    remembered."""
    state = grad_state(x)
    state.former = tuple(grad_leaves(x)[1:])
    state.aliases = state.origin = None
    state.hooked = hooked or state.hooked


def keep_grad(x: MeshTensor, axes: Axes, g: Tensor) -> None:
    """Make ``g`` the gradient that was collected for uses varying over ``axes``."""
    for own, leaf in grad_leaves(x):
        if own == axes:
            leaf.grad = g
            return
    state = grad_state(x)
    with torch.enable_grad():
        if state.hooked:
            leaf = x.local.detach().requires_grad_()
            state.former += ((axes, leaf),)
        else:
            leaf = x.local_for(axes)
        leaf.grad = g


def has_grads(x: MeshTensor) -> bool:
    return any(leaf.grad is not None for _, leaf in grad_leaves(x))


def drop_grads(x: MeshTensor) -> None:
    """Nothing has been collected."""
    x.local.grad = None
    state = x._grad_state
    if state is None:
        return
    if state.origin is None and not state.former:  # most leaves, and quickly
        for alias, made_at, _ in state.aliases.values() if state.aliases is not None else ():
            if made_at < 0:
                alias.grad = None
        return
    for _, leaf in grad_leaves(x)[1:]:
        leaf.grad = None


def remember_grad(x: MeshTensor, g: MeshTensor | None, made: bool = False) -> None:
    """``g`` is what ``x.grad`` gives. ``made``: of x's own, so that a reduction of it is one of x's
    gradient."""
    if g is not None and made:
        grad_state(g).owner = weakref.ref(x)
    if g is not None or x._grad_state is not None:
        grad_state(x).grad = g


def set_origin(x: MeshTensor, origin: Callable[[Axes], Tensor] | None) -> None:
    """Aliases of x are made by ``origin``, and those that there are no longer count."""
    if origin is not None or x._grad_state is not None:
        state = grad_state(x)
        state.aliases, state.origin = None, origin


def given_uses(
    x: MeshTensor,
    origin: Callable[[Axes], Tensor] | None,
    aliases: Sequence[tuple[Axes, Tensor]],
) -> None:
    """The uses of a new tensor: how aliases of it are made, and those that were made by now."""
    state = grad_state(x)
    state.origin = origin
    if aliases:
        now = x.local._version + UNCOUNTED[0], region()
        state.aliases = {axes: (alias, *now) for axes, alias in aliases}


def forget_hooked_aliases(x: MeshTensor) -> None:
    """The memory of x is another one: aliases of a leaf with hooks are in the graph, of the old
    value."""
    state = x._grad_state
    if state is not None and state.hooked:
        state.aliases = None


def set_collector(x: MeshTensor, collector: GradCollector) -> None:
    grad_state(x).collector = collector


def fix_spec(x: MeshTensor, feature: str) -> None:
    """From now on ``p.data = value`` keeps the layout and the dtype of x."""
    grad_state(x).fixed_by = feature


def collector_of(x: MeshTensor) -> GradCollector | None:
    state = x._grad_state
    return None if state is None else state.collector


def origin_of(x: MeshTensor) -> Callable[[Axes], Tensor] | None:
    state = x._grad_state
    return None if state is None else state.origin
