"""The ``_copy`` forms of views: they have the placements of the view, and their own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.dims import moved, named
from ops.factors import Arg, Factors, NoRule, pointwise_factors
from ops.local import LocalCall
from ops.registry import rule
from ops.shape import permute, split, view
from ops.shape.concat import at_least

VIEWS: dict[str, Callable[..., Factors]] = {
    **{f.__name__: f for f in (permute.diagonal, permute.permute, permute.transpose, permute.t)},
    **{f.__name__: f for f in (permute.unfold, split.unbind, view.expand, view.squeeze)},
    "unsqueeze": view.unsqueeze, "split_with_sizes": split.split, "alias": view.same,
}  # fmt: skip


def copied(seen: Callable[..., Factors]) -> Callable[..., Factors]:
    """Returns the factors of a copy of the view that ``seen`` describes."""

    def factors(*args: Any, **kwargs: Any) -> Factors:
        f = seen(*args, **kwargs)
        inner = f.local

        def local(call: LocalCall) -> Any:
            run = call.func if inner is None else inner(call)
            return lambda *args, **kwargs: _own(run(*args, **kwargs))

        return f.replace(local=local)

    return factors


def _own(value: Any) -> Any:
    """Returns tensors in memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return type(value)(map(_own, value))


for _name, _view in VIEWS.items():
    rule(*named(_name + "_copy"), exact=True, doc=f"as {_name}")(copied(_view))


def _at_least(n: int) -> Callable[..., Factors]:
    def factors(*tensors: Any) -> Factors:
        if len(tensors) != 1 or not isinstance(tensors[0], Arg):
            raise NoRule("several tensors")
        return moved(tensors[0], at_least(tensors[0], n))

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
