"""Uses: the tensors in autograd's graph through which the value of a DistTensor is read.

A use that varies over mesh axes reads an *alias*: it has the value of the local, and its gradient
has another meaning (``disttensor.autograd.grad_types``). ``mode_of`` says how an alias is made:

    LEAF      the local is a leaf without hooks: a second leaf with the same memory, which collects
              a gradient of its own
    DERIVED   the tensor was made from others: ``origin(axes)`` makes it from them again
    LOCAL     any other tensor, and one with hooks: the local, behind a node whose backward reduces

Transitions: ``set_origin`` (to DERIVED), ``hook`` (to LOCAL), ``invalidate`` (after a write, from
DERIVED to LOCAL or LEAF). A tensor gets its Uses with its first alias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from disttensor.autograd.activation_checkpoint import region
from disttensor.autograd.grad_types import apply_transition, scale_average_grad, transition_between
from disttensor.core.layout import Axes
from disttensor.tensor.versions import INFERENCE, UNTRACKED, count
from disttensor.tensor.views import invalidate as invalidate_views

Tensor = torch.Tensor
Origin = Callable[[Axes], Tensor]
ANY = -1  # the version of an alias that shares the memory of its tensor


class UseMode(Enum):
    LEAF = "leaf"
    DERIVED = "derived"
    LOCAL = "local"


class Alias(NamedTuple):
    """``version``: of the local when the alias was made; ``region``: of activation checkpointing,
    in which it was made."""

    local: Tensor
    version: int
    region: Any


class Uses:
    """
    aliases  by the axes over which their uses vary.
    origin   makes the aliases of a DERIVED tensor.
    frozen   aliases from before hooks were registered, or of other regions.
    hooked   True for a leaf with hooks, which must see the reduced gradient.
    """

    aliases: dict[Axes, Alias] | None = None
    origin: Origin | None = None
    frozen: tuple[tuple[Axes, Tensor], ...] = ()
    hooked: bool = False


def uses_of(x: Any) -> Uses:
    """Returns the Uses of x, which it makes if there is none."""
    uses: Uses | None = x._uses
    if uses is None:
        uses = x._uses = Uses()
    return uses


def mode_of(x: Any) -> UseMode:
    uses: Uses | None = x._uses
    if uses is not None and uses.origin is not None:
        return UseMode.DERIVED
    hooked = uses is not None and uses.hooked
    return UseMode.LEAF if x.local.is_leaf and not hooked else UseMode.LOCAL


def alias_of(x: Any, axes: Axes) -> Tensor:
    """Returns the local of x for a use that varies over ``axes``, see ``MeshTensor.local_for``."""
    uses: Uses | None = x._uses
    if uses is not None and uses.aliases is not None:
        hit = uses.aliases.get(axes)
        if hit is not None and (
            hit[1] < 0 or (hit[1] == x.local._version + UNTRACKED[0] and hit[2] == region())
        ):
            return hit[0]
    local: Tensor = x.local
    if not axes or not local.requires_grad or not torch.is_grad_enabled():
        return local
    uses = uses or uses_of(x)
    made_at, mode = local._version + UNTRACKED[0], mode_of(x)
    if mode is UseMode.DERIVED:
        alias = uses.origin(axes)  # type: ignore[misc]
    elif mode is UseMode.LEAF:
        alias, made_at = scale_average_grad(local.detach().requires_grad_(), x.spec), ANY
    else:
        alias = apply_transition(local, transition_between(x.spec, (), x.spec, axes), None)
    if uses.aliases is None:
        uses.aliases = {}
    elif axes in uses.aliases and mode is UseMode.DERIVED and not local.is_leaf:
        uses.frozen += ((axes, uses.aliases[axes].local),)  # of another region
    uses.aliases[axes] = Alias(alias, made_at, region())
    return alias


# Reading --------------------------------------------------------------------------------------


def leaves_of(x: Any) -> list[tuple[Axes, Tensor]]:
    """Returns the tensors in autograd's graph whose gradients sum to x's gradient: the local, and
    one alias for each set of varying axes. The aliases of a leaf are leaves too; other aliases
    count if they were made from x's origin."""
    uses: Uses | None = x._uses
    if uses is None:
        return [((), x.local)]
    from_origin = not x.local.is_leaf and uses.origin is not None
    made = uses.aliases.items() if uses.aliases is not None else ()
    aliases = [(axes, alias) for axes, (alias, made_at, _) in made if from_origin or made_at < 0]
    return [((), x.local), *aliases, *uses.frozen]


def count_leaves(x: Any) -> int:
    """Returns the number of ``leaves_of`` a leaf x without an origin."""
    uses: Uses | None = x._uses
    if uses is None:
        return 1
    return 1 + len(uses.frozen) + (len(uses.aliases) if uses.aliases is not None else 0)


def aliases_of_leaf(x: Any) -> list[Tensor]:
    """Returns the aliases of a leaf x."""
    uses: Uses | None = x._uses
    if uses is None or uses.aliases is None:
        return []
    return [alias for alias, made_at, _ in uses.aliases.values() if made_at < 0]


def origin_of(x: Any) -> Origin | None:
    uses: Uses | None = x._uses
    return None if uses is None else uses.origin


# Transitions ----------------------------------------------------------------------------------


def set_origin(x: Any, origin: Origin | None) -> None:
    """Sets the function that makes aliases of x, and drops the existing aliases. None: aliases are
    made from the local."""
    if origin is not None or x._uses is not None:
        uses = uses_of(x)
        uses.aliases, uses.origin = None, origin


def set_uses(x: Any, origin: Origin | None, aliases: Sequence[tuple[Axes, Tensor]]) -> None:
    """Sets the uses of a new tensor: the function that makes aliases, and the existing aliases."""
    uses = uses_of(x)
    uses.origin = origin
    if aliases:
        now = x.local._version + UNTRACKED[0], region()
        uses.aliases = {axes: Alias(alias, *now) for axes, alias in aliases}


def hook(x: Any, of_leaf: bool = False) -> None:
    """Makes every later use of x go through its local (which has hooks), and freezes the earlier
    aliases. ``of_leaf``: x is a leaf, and the hooks must see its reduced gradient."""
    uses = uses_of(x)
    uses.frozen = tuple(leaves_of(x)[1:])
    uses.aliases = uses.origin = None
    uses.hooked = of_leaf or uses.hooked


def add_leaf(x: Any, axes: Axes) -> Tensor:
    """Returns the leaf that collects the gradient of uses of the leaf x that vary over ``axes``."""
    for own, leaf in leaves_of(x):
        if own == axes:
            return leaf
    with torch.enable_grad():
        if not uses_of(x).hooked:
            return alias_of(x, axes)
        leaf = x.local.detach().requires_grad_()
        uses_of(x).frozen += ((axes, leaf),)
        return leaf


def forget_hooked_aliases(x: Any) -> None:
    """Drops the aliases of a hooked leaf whose memory was replaced: they hold the old value."""
    uses: Uses | None = x._uses
    if uses is not None and uses.hooked:
        uses.aliases = None


def invalidate(x: Any) -> None:
    """Drops everything that was made from the old value, after an in-place write: the origin, the
    reduction, the aliases of a non-leaf. Copies in place of views raise when used."""
    uses: Uses | None = x._uses
    if uses is not None:
        uses.origin = None
        if not x.local.is_leaf:
            uses.aliases = None
    x._reduced = None
    if INFERENCE and x.local.is_inference():
        count(x.local)
    invalidate_views(x.local)
