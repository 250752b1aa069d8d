"""Uses: the tensors in autograd's graph through which the value of a DistTensor is read.

A use that varies over mesh axes reads an *alias*: it has the value of the local, and its gradient
has another meaning (``disttensor.autograd.grad_types``). An alias is made in one of three ways:

    LEAF      the local is a leaf: a second leaf with the same memory, which collects a gradient of
              its own
    DERIVED   the tensor is a view, the result of a reshard, or of a call that is cheap to repeat,
              and its ``Derivation`` still holds: it is made from its source again
    LOCAL     any other tensor, and one with hooks: the local, behind a node whose backward reduces

A derivation is data. It says what its source stood for when the result was made. If the source has
changed since (it was written to, detached or frozen, or it has other memory), the derivation does
not hold any more, and aliases are made from the local. This is right too, and costs one reduction
more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch

from disttensor import observe
from disttensor.autograd.activation_checkpoint import region
from disttensor.autograd.grad_types import apply_transition, scale_average_grad, transition_between
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.tensor.versions import version
from disttensor.tensor.views import invalidate as invalidate_views
from disttensor.torch_private import storage_id

Tensor = torch.Tensor
T = TypeVar("T")


class Derivation(NamedTuple):
    """How the local of a result was made from the DistTensor ``x``, and what x stood for then.

    x, local, spec, version, is_leaf  the source, its local and spec, and the state of its local.
    sets_of_data  how often ``x.data = value`` had been done.
    local_fn      the call of a local function: a view function, or one that is cheap to repeat.
                  None: the result is a reshard; ``args``: the dtype in which its gradient is
                  resharded, if one was given.
    args, named   of the call, without the source, which is at the position or keyword ``at``.
    given         the tensors among them, with their versions.
    """

    x: Any
    local: Tensor
    spec: DistSpec
    version: int
    is_leaf: bool
    sets_of_data: int
    local_fn: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    named: dict[str, Any] = {}  # noqa: RUF012  (never written to)
    at: int | str = 0
    given: Sequence[tuple[Tensor, int]] = ()

    def holds(self) -> bool:
        """Returns True if x still stands for the same node of autograd's graph. A write to a leaf
        keeps its node."""
        x, local = self.x, self.local
        if x.local is not local or x.spec is not self.spec or not local.requires_grad:
            return False
        if local.is_leaf is not self.is_leaf:
            return False
        return self.is_leaf or version(local) == self.version

    def has_inputs(self, result: Tensor) -> bool:
        """Returns True if the call would give the value of ``result``: a view of the same memory,
        or a copy of values that have not changed."""
        if self.x._sets_of_data != self.sets_of_data:
            return False
        shares = storage_id(result.untyped_storage()) == storage_id(self.local.untyped_storage())
        unchanged = shares or version(self.local) == self.version
        return unchanged and all(version(t) == n for t, n in self.given)

    def repeat(self, source: Tensor) -> Tensor:
        """Runs the call with another use of the source."""
        args, named = list(self.args), self.named
        if isinstance(self.at, str):
            named = {**named, self.at: source}
        else:
            args.insert(self.at, source)
        out: Tensor = observe.run_local(self.local_fn, args, named)  # type: ignore[arg-type]
        return out


class Made(IntEnum):
    """How an alias was made. native.c tests for a number below 0."""

    LEAF = -1
    DERIVED = 0
    LOCAL = 1


class Alias(NamedTuple):
    """``region``: of activation checkpointing, in which the alias was made."""

    local: Tensor
    made: Made
    region: Any


class Uses:
    """
    aliases     by the axes over which their uses vary.
    version     of the local, of which aliases and derivation are.
    derivation  how the tensor was made, or None.
    older       derived aliases of other regions of activation checkpointing.
    """

    aliases: dict[Axes, Alias] | None = None
    version: int = 0
    derivation: Derivation | None = None
    older: tuple[tuple[Axes, Tensor], ...] = ()


def uses_of(x: Any) -> Uses:
    """Returns the Uses of x for its present value."""
    uses: Uses | None = x._uses
    local: Tensor = x.local
    if uses is None or not (local.is_leaf or uses.version == local._version):
        uses = x._uses = Uses()
        uses.version = 0 if local.is_inference() else local._version
    return uses


def alias_of(x: Any, axes: Axes) -> Tensor:
    """Returns the local of x for a use that varies over ``axes``, see ``MeshTensor.local_for``."""
    uses: Uses | None = x._uses
    local: Tensor = x.local
    if uses is not None and uses.aliases is not None:
        hit = uses.aliases.get(axes)
        if hit is not None and (
            hit[1] < 0 or (uses.version == local._version and hit[2] == region())
        ):
            return hit[0]
    if not axes or not local.requires_grad or not torch.is_grad_enabled():
        return local
    uses = uses_of(x)
    derived = _derived(x, uses.derivation, axes)
    if derived is not None:  # also of a reshard that gave the local of a leaf
        made, alias = Made.DERIVED, derived
        if local.retains_grad:
            alias.retain_grad()
    elif local.is_leaf:
        made, alias = Made.LEAF, _second_leaf(x)
    else:
        made = Made.LOCAL
        alias = apply_transition(local, transition_between(x.spec, (), x.spec, axes), None)
    if uses.aliases is None:
        uses.aliases = {}
    earlier = uses.aliases.get(axes)
    if earlier is not None and earlier.made is Made.DERIVED:
        uses.older += ((axes, earlier.local),)
    uses.aliases[axes] = Alias(alias, made, region())
    return alias


def _second_leaf(x: Any) -> Tensor:
    """Returns a leaf with the memory of the leaf of x. All that users set on a leaf and that counts
    in a backward is passed on here."""
    leaf = x.local.detach().requires_grad_(x.local.requires_grad)
    if x.local.grad_dtype is not x.local.dtype:
        leaf.grad_dtype = x.local.grad_dtype
    scale_average_grad(leaf, x.spec)
    slot = x._grad_slot
    if slot is not None and slot.hooks is not None:
        slot.hooks.watch(leaf)
    return leaf


def varying_axes(x: Any, dst: DistSpec, axes: Axes) -> Axes:
    """Returns the axes over which the use of x varies if x is resharded to ``dst`` and the result
    is used varying over ``axes``. Axes on which x is split or pending are left out.

    The axes that split ``dst`` are included if x is a leaf: it collects the gradient of its slice
    as a contribution, without communication.
    """
    spec = x.spec
    cut = dst.layout.sharded if x.local.is_leaf else ()
    if not axes and not cut:
        return ()
    return tuple(
        [a for a in range(spec.mesh.ndim) if a not in spec.varies and (a in axes or a in cut)]
    )


def _derived(result: Any, made: Derivation | None, axes: Axes) -> Tensor | None:
    """Makes the local of ``result`` from its source again, for a use that varies over ``axes``.
    Returns None if this cannot be done, or no longer."""
    if made is None or not made.holds():
        return None
    if made.local_fn is not None:
        if not made.has_inputs(result.local):
            return None
        return made.repeat(made.x.local_for(axes))
    read = () if made.args else varying_axes(made.x, result.spec, axes)
    transition = transition_between(made.spec, read, result.spec, axes, *made.args)
    return apply_transition(made.x.local_for(read), transition, [result.local.detach()])


# Reading --------------------------------------------------------------------------------------


def leaves_of(x: Any) -> list[tuple[Axes, Tensor]]:
    """Returns the tensors in autograd's graph whose gradients sum to x's gradient: the local, and
    one alias for each set of varying axes. The aliases of a leaf are leaves too; other aliases
    count if they were made from x's source."""
    uses: Uses | None = x._uses
    if uses is None:
        return [((), x.local)]
    made = uses.aliases.items() if uses.aliases is not None else ()
    aliases = [(axes, alias) for axes, (alias, how, _) in made if how is not Made.LOCAL]
    return [((), x.local), *aliases, *uses.older]


def count_leaves(x: Any) -> int:
    """Returns the number of ``leaves_of`` a leaf x."""
    uses: Uses | None = x._uses
    return 1 + (0 if uses is None or uses.aliases is None else len(uses.aliases))


def aliases_of_leaf(x: Any) -> list[Tensor]:
    """Returns the aliases of a leaf x."""
    return [alias for _, alias in leaves_of(x)[1:]]


# Derivations ----------------------------------------------------------------------------------


def set_derivation(result: Any, local: Tensor, source: Any, *call: Any) -> None:
    """Records that ``result``, a new tensor with the local ``local`` in autograd's graph, was made
    from ``source``: by the ``call``, as in ``Derivation``, or by a reshard."""
    x = source.local
    uses = result._uses = Uses()
    uses.version = local._version
    uses.derivation = Derivation(
        source, x, source.spec, version(x), x.is_leaf, source._sets_of_data, *call
    )


def with_versions(tensors: Sequence[Any]) -> list[tuple[Tensor, int]]:
    """Returns the tensors among the arguments, with their versions."""
    return [(t, version(t)) for t in tensors if isinstance(t, Tensor)]


def derivation_of(x: Any) -> Derivation | None:
    return None if x._uses is None else x._uses.derivation


def derivation_from_leaf(x: Any) -> Derivation | None:
    """Returns the derivation of x if its first source is a leaf."""
    found = above = derivation_of(x)
    while above is not None and not above.is_leaf:
        above = derivation_of(above.x)
    return None if above is None else found


def with_derivation(x: T, derivation: Derivation | None) -> T:
    """Returns x, a new tensor, whose local was made as ``derivation`` says."""
    if derivation is not None:
        uses_of(x).derivation = derivation
    return x


def forget_derivation(x: Any) -> None:
    """Makes later aliases of x from its local."""
    if x._uses is not None:
        x._uses.derivation = None


def made_from(result: Any, source: Any, other: Any) -> Uses | None:
    """Returns the Uses of ``result`` with ``other`` in the place of its source ``source``."""
    uses: Uses | None = result._uses
    derivation = derivation_of(result)
    if uses is not None and derivation is not None and derivation.x is source:
        uses.derivation = derivation._replace(x=other)
    return uses


def set_aliases(x: Any, aliases: Sequence[tuple[Axes, Tensor]]) -> None:
    """Gives a new tensor the aliases of its local that the end of a recorded program has."""
    uses_of(x).aliases = {axes: Alias(alias, Made.LOCAL, region()) for axes, alias in aliases}


def add_leaf(x: Any, axes: Axes) -> Tensor:
    """Returns the leaf that collects the gradient of uses of the leaf x that vary over ``axes``."""
    for own, leaf in leaves_of(x):
        if own == axes:
            return leaf
    uses = uses_of(x)
    uses.aliases = {} if uses.aliases is None else uses.aliases
    leaf = _second_leaf(x)
    uses.aliases[axes] = Alias(leaf, Made.LEAF, None)
    return leaf


def invalidate(x: Any) -> None:
    """Drops everything that was made from the old value, after an in-place write: the derivation,
    the reduction, the aliases of a non-leaf. Copies in place of views raise when used."""
    if x._uses is not None and not x.local.is_leaf:
        x._uses = None
    x._reduced = None
    invalidate_views(x.local)
