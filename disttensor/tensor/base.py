"""The base class of DistTensor: this rank's local, the spec, and the leaves that collect gradients.

``DistTensor`` (``dist_tensor.py``) joins the mixins; a mixin makes another tensor of its class with
``like``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch

from disttensor import observe
from disttensor.autograd.activation_checkpoint import region
from disttensor.autograd.grad_types import along, way, whole_grad
from disttensor.comm.places import Place
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.observe import observers
from disttensor.tensor.versions import INFERENCE, UNCOUNTED, count
from disttensor.tensor.views import ViewState, invalidate
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
T = TypeVar("T", bound="MeshTensor")


class GradCollector(Protocol):
    """Collects the gradients of a leaf on other tensors, and brings them to the leaf (see
    ``disttensor.fsdp.param``)."""

    feature: str  # its name in errors
    hooks: OrderedDict[int, Callable[[Any], Any]]  # called when the leaf has its gradient

    def grad_leaves(self) -> list[tuple[Axes, Tensor]]: ...
    def gradient(self, pieces: list[tuple[Axes, Tensor]]) -> Any: ...  # of the leaf, in the graph
    def waiting(self) -> Any: ...  # the collected gradient before its reduction, or None
    def drop(self) -> None: ...
    def renew(self) -> None: ...


class GradState:
    """Gradient state of a DistTensor; ``grad_state`` makes it on first use. An *alias* is the
    tensor that ``local_for`` returns for a varying use.

    aliases    axes -> (the local for uses varying over them, its version then (-1: any version),
               the region of activation checkpointing it was made in)
    origin     ``origin(axes)`` makes an alias from the source of the tensor
    former     aliases from before hooks were registered, or of other regions
    hooked     True for a leaf whose hooks must see the reduced gradient
    grad       the last result of ``.grad``
    owner      weak reference to the leaf whose gradient this tensor is
    collector  collects the gradients of this leaf on other tensors
    fixed_by   the feature that relies on the leaf's layout and dtype
    place      the persistent memory of its gradient
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
    """``local``, ``spec`` and optional state, which is None until first needed."""

    local: Tensor
    spec: DistSpec
    _grad_state: GradState | None = None  # disttensor.tensor.base
    _view_state: ViewState | None = None  # disttensor.tensor.views
    # torch's mark of an nn.Parameter: set by ``nn.Parameter`` and ``as_parameter``
    _is_param: bool = False
    # the result of an earlier reduction of a pending value: disttensor.dispatch.reduction_cache
    _reduced: Any = None

    def like(self, local: Tensor, spec: DistSpec) -> Self:
        """Returns another tensor of this class."""
        out: Self = make_subclass(type(self), spec.meta_tensor)
        out.local = local
        out.spec = spec
        return out

    @property
    def is_initialized(self) -> bool:
        """False on a rank off the mesh, which has the metadata only."""
        return self.spec.mesh.coordinate is not None

    def local_for(self, axes: Axes) -> Tensor:
        """Returns the local for a use that varies over ``axes`` (sorted; the value is replicated
        there).

        Its value is the value of ``local``, but its gradient has another meaning: see
        ``disttensor.autograd.grad_types``.
        """
        if observers:
            return observe.read_local(MeshTensor._local_for, self, axes)
        return self._local_for(axes)

    def _local_for(self, axes: Axes) -> Tensor:
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
        """Invalidates what was made of the old value, after an in-place write: the origin, the
        reduction, the aliases of a non-leaf. Copies in place of views raise when used."""
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
    """Marks ``x`` itself as an ``nn.Parameter``; ``nn.Parameter(x)`` would make another tensor."""
    x._is_param = True
    return x


def grad_state(x: MeshTensor) -> GradState:
    state = x._grad_state
    if state is None:
        state = x._grad_state = GradState()
    return state


def place_of(x: MeshTensor) -> Place:
    """Returns the place of a gradient that is summed in one bucket with others."""
    state = grad_state(x)
    if state.place is None:
        state.place = Place()
    return state.place


def from_origin(origin: Callable[[Axes], Tensor]) -> GradState:
    """Returns the state of a new tensor whose aliases ``origin`` makes from its source."""
    state = GradState()
    state.origin = origin
    return state


def grad_leaves(x: MeshTensor) -> list[tuple[Axes, Tensor]]:
    """Returns the tensors in autograd's graph whose gradients sum to x's gradient: the local, and
    one alias per set of varying axes.

    The aliases of a leaf are leaves too; other aliases were made from x's origin.
    """
    state = x._grad_state
    if state is None:
        return [((), x.local)]
    apart = not x.local.is_leaf and state.origin is not None
    made = state.aliases.items() if state.aliases is not None else ()
    aliases = [(axes, alias) for axes, (alias, made_at, _) in made if apart or made_at < 0]
    return [((), x.local), *aliases, *state.former]


def count_leaves(x: MeshTensor) -> int:
    """Returns the number of ``grad_leaves`` of a leaf x without an origin."""
    state = x._grad_state
    if state is None:
        return 1
    return 1 + len(state.former) + (len(state.aliases) if state.aliases is not None else 0)


def alias_leaves(x: MeshTensor) -> list[Tensor]:
    """Returns the second leaves of a leaf x."""
    state = x._grad_state
    if state is None or state.aliases is None:
        return []
    return [alias for alias, made_at, _ in state.aliases.values() if made_at < 0]


def through(x: MeshTensor, dst: DistSpec, axes: Axes) -> Axes:
    """Returns the axes over which the use of x varies if x is resharded to ``dst`` and the result
    is used varying over ``axes``. Axes on which x is split or pending are left out.

    The axes that split ``dst`` are included if x is a leaf without hooks: it collects the gradient
    of its slice as a contribution, without communication.
    """
    for o in observe.seeing_calls():
        o.read_for_reshard(x)
    spec = x.spec
    cut = dst.layout.sharded if is_free_leaf(x) else ()
    if not axes and not cut:
        return ()
    return tuple(
        [a for a in range(spec.mesh.ndim) if a not in spec.varies and (a in axes or a in cut)]
    )


def is_free_leaf(x: MeshTensor) -> bool:
    """Returns True for a leaf whose varying uses collect their own gradients."""
    state = x._grad_state
    return x.local.is_leaf and (state is None or (not state.hooked and state.origin is None))


def freeze_leaves(x: MeshTensor, hooked: bool = False) -> None:
    """Makes every later use of x go through its local (which has hooks). Earlier aliases are kept
    in ``former``."""
    state = grad_state(x)
    state.former = tuple(grad_leaves(x)[1:])
    state.aliases = state.origin = None
    state.hooked = hooked or state.hooked


def keep_grad(x: MeshTensor, axes: Axes, g: Tensor) -> None:
    """Sets ``g`` as the gradient that was collected for uses varying over ``axes``."""
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
    """Drops all collected gradients of x."""
    x.local.grad = None
    state = x._grad_state
    if state is None:
        return
    if state.origin is None and not state.former:  # the fast path for most leaves
        for alias, made_at, _ in state.aliases.values() if state.aliases is not None else ():
            if made_at < 0:
                alias.grad = None
        return
    for _, leaf in grad_leaves(x)[1:]:
        leaf.grad = None


def remember_grad(x: MeshTensor, g: MeshTensor | None, made: bool = False) -> None:
    """Stores ``g`` as the result of ``x.grad``. With ``made``, a reduction of ``g`` also reduces
    the gradient of x."""
    if g is not None and made:
        grad_state(g).owner = weakref.ref(x)
    if g is not None or x._grad_state is not None:
        grad_state(x).grad = g


def set_origin(x: MeshTensor, origin: Callable[[Axes], Tensor] | None) -> None:
    """Sets the function that makes aliases of x, and drops the existing aliases."""
    if origin is not None or x._grad_state is not None:
        state = grad_state(x)
        state.aliases, state.origin = None, origin


def given_uses(
    x: MeshTensor,
    origin: Callable[[Axes], Tensor] | None,
    aliases: Sequence[tuple[Axes, Tensor]],
) -> None:
    """Sets the uses of a new tensor: the function that makes aliases, and the existing aliases."""
    state = grad_state(x)
    state.origin = origin
    if aliases:
        now = x.local._version + UNCOUNTED[0], region()
        state.aliases = {axes: (alias, *now) for axes, alias in aliases}


def forget_hooked_aliases(x: MeshTensor) -> None:
    """Drops the aliases of a hooked leaf whose memory was replaced: they hold the old value."""
    state = x._grad_state
    if state is not None and state.hooked:
        state.aliases = None


def set_collector(x: MeshTensor, collector: GradCollector) -> None:
    grad_state(x).collector = collector


def fix_spec(x: MeshTensor, feature: str) -> None:
    """Makes ``p.data = value`` require the layout and the dtype of x, for ``feature``."""
    grad_state(x).fixed_by = feature


def collector_of(x: MeshTensor) -> GradCollector | None:
    state = x._grad_state
    return None if state is None else state.collector


def origin_of(x: MeshTensor) -> Callable[[Axes], Tensor] | None:
    state = x._grad_state
    return None if state is None else state.origin
