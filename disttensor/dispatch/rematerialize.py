"""Recomputes a cheap result for uses that vary over other axes, instead of communicating. The graph
then contains one value for each set of axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor import observe
from disttensor.autograd.grad_types import GradType, reshard_local
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.versions import version

Tensor = torch.Tensor
Function = Callable[..., Any]


def repeat(
    local_fn: Function, args: Sequence[Any], words: dict[str, Any], made: list[int],
    value: Tensor, made_at: int, spec: DistSpec, axes: Axes,
) -> Tensor:  # fmt: skip
    """Repeats the call of a cheap result with uses that vary over ``axes``, or moves the value
    after a write. ``made``, ``made_at``: versions of the arguments and of ``value`` at the call."""
    now = versions_of([t for t in (*args, *words.values()) if isinstance(t, Tensor)])
    if version(value) != made_at or now != made:
        return reshard_local(value, GradType(spec), GradType(spec, axes), None)
    varying = [_varying(a, axes) for a in args]
    named = {k: _varying(v, axes) for k, v in words.items()}
    return observe.run_local(local_fn, varying, named)


def _varying(a: Any, axes: Axes) -> Any:
    return a.local_for(axes) if type(a) is DistTensor else a


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [version(t.local if type(t) is DistTensor else t) for t in tensors]
