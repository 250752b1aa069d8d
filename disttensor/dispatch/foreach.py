"""Functions over lists of tensors (``torch._foreach_*``, fused optimizers) where the tensors lie on
several meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disttensor.tensor.dist_tensor import DistTensor

Function = Callable[..., Any]


def meshes_of(func: Function, args: Sequence[Any]) -> int:
    """On how many meshes are the tensors of the first list of such a function? 0: it is none."""
    if not func.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 0
    return len(_by_mesh(args[0])) if args and isinstance(args[0], (list, tuple)) else 0


def _by_mesh(members: Sequence[Any]) -> dict[Any, list[int]]:
    """mesh (None: plain) -> the numbers of its members."""
    numbers: dict[Any, list[int]] = {}
    for i, t in enumerate(members):
        numbers.setdefault(t.spec.mesh if type(t) is DistTensor else None, []).append(i)
    return numbers


def each_mesh(func: Function) -> Callable[[Sequence[Any], Any], Any]:
    """The runner: one call for each mesh, with its members of every list; results in the order of
    the members."""

    def run(args: Sequence[Any], kwargs: Any) -> Any:
        first = args[0]
        out: list[Any] = [None] * len(first)
        single = True
        for numbers in _by_mesh(first).values():

            def share(a: Any, numbers: list[int] = numbers) -> Any:
                if isinstance(a, (list, tuple)) and len(a) == len(first):
                    return [a[i] for i in numbers]
                return a

            given = func(*map(share, args), **{k: share(v) for k, v in (kwargs or {}).items()})
            if isinstance(given, (list, tuple)):
                single = False
                for i, value in zip(numbers, given, strict=True):
                    out[i] = value
        return None if single else first if func.__name__.endswith("_") else tuple(out)

    return run
