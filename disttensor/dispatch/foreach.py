"""Runs functions over lists of tensors (``torch._foreach_*``, fused optimizers) on several
meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.core.layout import replicated
from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import PythonCall
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded

Function = Callable[..., Any]
# The list of steps, which is only read. Optimizers may keep all steps on one mesh.
_STEPS = {torch._fused_adam_: 5, torch._fused_adamw_: 5}


def meshes_of(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Returns the number of meshes in the lists of such a function; 0 for other functions."""
    if not getattr(func, "__name__", "").startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 0
    count = len(_by_mesh(args, kwargs)[1])
    return count + any(mesh is not None for mesh in _other_meshes(func, args))


def _other_meshes(func: Function, args: Sequence[Any]) -> list[Any]:
    """Returns for each step the mesh of its parameter, or None if the step is on it."""
    at = _STEPS.get(func, len(args))
    return [
        p.spec.mesh if isinstance(p, DistTensor) and isinstance(step, DistTensor)
        and step.spec.mesh is not p.spec.mesh else None
        for p, step in (zip(args[0], args[at], strict=True) if at < len(args) else ())
    ]  # fmt: skip


def _by_mesh(args: Sequence[Any], kwargs: Any) -> tuple[Sequence[Any], dict[Any, list[int]]]:
    """Returns the first list, and the indices of its members by mesh (None: all are regular)."""
    lists = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, (list, tuple))]
    first = lists[0] if lists else ()
    numbers: dict[Any, list[int]] = {}
    for i, members in enumerate(zip(*(a for a in lists if len(a) == len(first)), strict=True)):
        meshes = (t.spec.mesh for t in members if isinstance(t, DistTensor))
        numbers.setdefault(next(meshes, None), []).append(i)
    return first, numbers


def run_per_mesh(planned: PythonCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Makes one call for each mesh, with the members of every list on this mesh. The results have
    the order of the members."""
    func, args = planned.func, [*args]
    meshes = _other_meshes(func, args)
    if any(mesh is not None for mesh in meshes):
        args[_STEPS[func]] = [
            step if mesh is None
            else resharded(step, DistSpec(mesh, replicated(0), step.shape, step.dtype))
            for step, mesh in zip(args[_STEPS[func]], meshes, strict=True)
        ]  # fmt: skip
    first, by_mesh = _by_mesh(args, kwargs)
    out: list[Any] = [None] * len(first)
    single = True
    for numbers in by_mesh.values():

        def share(a: Any, numbers: list[int] = numbers) -> Any:
            if isinstance(a, (list, tuple)) and len(a) == len(first):
                return [a[i] for i in numbers]
            return a

        given = func(*map(share, args), **{k: share(v) for k, v in kwargs.items()})
        if isinstance(given, (list, tuple)):
            single = False
            for i, value in zip(numbers, given, strict=True):
                out[i] = value
    return None if single else first if func.__name__.endswith("_") else tuple(out)
