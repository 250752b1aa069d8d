"""Runs functions over lists of tensors (``torch._foreach_*``, fused optimizers) on several
meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disttensor.dispatch.call_plan import PythonCall
from disttensor.tensor.dist_tensor import DistTensor

Function = Callable[..., Any]


def meshes_of(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Returns the number of meshes in the lists of such a function; 0 for other functions."""
    if not getattr(func, "__name__", "").startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 0
    return len(_by_mesh(args, kwargs)[1])


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
    func = planned.func
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
