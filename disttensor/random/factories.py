"""Factories on a mesh: this rank's piece of rand, randn, randint and randperm."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from disttensor.core.layout import box_at
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.random.distributions import permutation
from disttensor.random.draws import draw, fork_generators
from disttensor.torch_private import no_dispatch, no_function_mode

_DISTRIBUTIONS = {torch.rand: "uniform", torch.randn: "normal", torch.randint: "integers"}
_RANDOM = {*_DISTRIBUTIONS, torch.randperm}
_DRAW_NOTHING = frozenset({torch.zeros, torch.ones, torch.empty, torch.full})


def dtype_of(fn: Any, mesh: ProcessMesh, args: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a tensor that the factory ``fn`` makes. Raises torch's errors, on all
    ranks alike. A function that is not torch's makes ``dtype``, or the default dtype."""
    numbers = all(isinstance(a, (bool, int, float, complex)) for a in args)
    if not numbers or fn not in _RANDOM | _DRAW_NOTHING:
        return dtype or torch.get_default_dtype()
    return _dtype_of(fn, mesh.device, dtype, torch.get_default_dtype(), *args)


@lru_cache(maxsize=1024, typed=True)
def _dtype_of(
    fn: Any, device: torch.device, dtype: torch.dtype | None, default: torch.dtype, *args: Any
) -> torch.dtype:
    """Asks torch for one element, drawn by a generator that nothing else uses."""
    own = {"generator": torch.Generator(device)} if fn in _RANDOM else {}
    size: Any = 1 if fn is torch.randperm else (1,)
    given = (*args, size) if fn is torch.randint else (size, *args)
    with no_dispatch(), no_function_mode():
        try:
            made: torch.dtype = fn(*given, dtype=dtype, device=device, **own).dtype
        except NotImplementedError:  # it names a kernel
            raise TypeError(
                f"{fn.__name__}: {dtype} cannot hold its values; use a floating dtype, or convert "
                "the result"
            ) from None
    return made


def make_local(fn: Any, spec: DistSpec, args: Any, kwargs: Any) -> Any:
    """Returns this rank's piece of a random factory's tensor for the shape of ``spec``, or None for
    a factory that draws nothing.

    A factory that is not torch's own runs on the local shape, with generators seeded for this call
    and place.
    """
    if fn in _DRAW_NOTHING:
        return None
    axes, device = tuple(sorted(spec.layout.sharded)), spec.mesh.device
    if fn not in _RANDOM:
        first = box_at(spec.shape, spec.layout.dims, spec.mesh.shape, (0,) * spec.mesh.ndim)
        with fork_generators(spec.mesh, axes):
            if not math.prod(spec.local_shape):  # draws as other ranks do: all count the call
                fn(tuple(first.shape), *args, dtype=spec.dtype, device=device, **kwargs)
            return fn(spec.local_shape, *args, dtype=spec.dtype, device=device, **kwargs)
    unknown = [name for name in kwargs if name != "generator"]
    if unknown:
        raise TypeError(f"{fn.__name__} on a mesh: unknown argument {unknown[0]!r}")
    this = draw(spec.mesh, "invariant", kwargs.get("generator"))
    dtype, bounds = spec.dtype, dict[str, int]()
    if fn is torch.randperm:
        whole = permutation(*this.key, math.prod(spec.shape), device).to(dtype)
        return whole[spec.local_box.slices].clone()
    if fn is torch.randint:  # (high), or (low, high)
        bounds = dict(zip(("low", "high"), (0, *args)[-2:], strict=True))
    if this.invariant:
        return this.numbers(_DISTRIBUTIONS[fn], spec, dtype, device, **bounds)
    with this.seeded(axes, device):
        return fn(*bounds.values(), spec.local_shape, dtype=dtype, device=device)
