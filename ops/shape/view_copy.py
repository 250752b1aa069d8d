"""The ``_copy`` forms of views: placed as the view is, in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.dims import moved, named
from ops.factors import Arg, Factors, pointwise_factors
from ops.infer import NoRule
from ops.registry import RULES, Function, Rule, register, rule
from ops.shape import permute, view
from ops.shape.concat import at_least
from ops.shape.copied import copied

VIEWS = "expand diagonal permute split_with_sizes unbind unfold squeeze unsqueeze transpose t"


def _of(name: str) -> Function:
    """Returns the view of which ``name`` is the copy."""
    found: Function = getattr(torch, name, None) or getattr(torch.Tensor, name)
    return found


for _name in VIEWS.split():
    _rule = Rule(_name + "_copy", copied(RULES[_of(_name)].factors), pattern=f"as {_name}")
    register(_rule, *named(_name + "_copy"), exact=True)
register(Rule("alias_copy", copied(view.same), pattern="as detach"), torch.alias_copy, exact=True)


def _at_least(n: int) -> Callable[..., Factors]:
    def factors(*tensors: Any) -> Factors:
        if len(tensors) != 1 or not isinstance(tensors[0], Arg):
            raise NoRule("several tensors")
        return moved(tensors[0], at_least(tensors[0], n)[0], view=True)

    return factors


for _n in (1, 2, 3):
    rule(getattr(torch, f"atleast_{_n}d"), exact=True)(_at_least(_n))


@rule(torch.broadcast_tensors, exact=True)
def broadcast_tensors(*tensors: Any) -> Factors:
    """every dim passes through"""
    given = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    return pointwise_factors(given, len(given))


@rule(torch.linalg.diagonal, exact=True)
def linalg_diagonal(A: Arg, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Factors:
    """as diagonal"""
    return permute.diagonal(A, offset, dim1, dim2)
