"""Checks the results of a local function against the rule, and wraps them as DistTensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import CallPlan
from disttensor.pytree import collect, substitute
from disttensor.tensor.dist_tensor import wrap
from ops.registry import RULES

Tensor = torch.Tensor


def check_outputs(plan: CallPlan, out: Any) -> CallPlan:
    """Returns the plan with the dtypes of the first results. Raises RuntimeError if their shapes
    differ from the rule's."""
    results = list(plan.results)
    for i, (t, spec) in enumerate(zip(collect(out, []), results, strict=False)):
        if tuple(t.shape) != tuple(spec.local_shape):
            raise RuntimeError(
                f"the rule {RULES[plan.func].name} says that this rank's piece of {spec!r} is "
                f"{list(spec.local_shape)}, but the local function gave {list(t.shape)}: the rule "
                "is wrong"
            )
        results[i] = spec.with_dtype(t.dtype)
    return replace(plan, results=tuple(results), is_checked=True)


def wrap_outputs(out: Any, specs: Sequence[DistSpec]) -> Any:
    """Wraps local results as DistTensors, in the same structure."""
    if type(out) is Tensor:
        spec = specs[0]
        return wrap(out, spec if out.dtype is spec.dtype else spec.with_dtype(out.dtype))
    if (
        (type(out) is tuple or type(out) is list)
        and len(out) == len(specs)
        and all(type(t) is Tensor for t in out)
    ):
        return type(out)(
            [
                wrap(t, s if t.dtype is s.dtype else s.with_dtype(t.dtype))
                for t, s in zip(out, specs, strict=True)
            ]
        )
    numbers = itertools.count()
    return substitute(out, lambda t: wrap(t, specs[next(numbers)].with_dtype(t.dtype)))
