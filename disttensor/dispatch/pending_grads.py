"""Reduces pending gradients that a call needs reduced, in place as an optimizer step does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttensor.core.spec import DistSpec
from disttensor.gradients.sync import sync_gradients
from disttensor.pytree import collect
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.grad import is_gradient, owner_of


def needs_reduction(specs: Sequence[DistSpec], wanted: Sequence[DistSpec | None]) -> list[bool]:
    """Returns for each tensor argument whether it is pending and the call needs it reduced."""
    return [
        w is not None and bool(s.layout.partial) and not w.layout.partial
        for s, w in zip(specs, wanted, strict=True)
    ]


def reduce_pending(args: Sequence[Any], kwargs: Any, reduced: Sequence[bool]) -> bool:
    """Reduces the pending gradients of parameters among the arguments that the call needs reduced
    (``reduced``), as an optimizer step would. Returns True if there was one."""
    if not kwargs and not any(
        isinstance(a, (list, tuple, dict)) or (type(a) is DistTensor and is_gradient(a))
        for a in args
    ):
        return False
    tensors = collect((args, kwargs), [])
    owners = [
        owner_of(t)
        for t, now in zip(tensors, reduced, strict=True)
        if now and type(t) is DistTensor
    ]
    found = [p for p in owners if p is not None]
    if found:
        sync_gradients(found)
    return bool(found)
