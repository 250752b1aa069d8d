"""Factories on a mesh: this rank's piece of rand, randn, randint and randperm."""

from __future__ import annotations

import math
from typing import Any

import torch

from disttensor.core.spec import DistSpec
from disttensor.random.distributions import permutation
from disttensor.random.state import draw, fork_generators

_DISTRIBUTIONS = {torch.rand: "uniform", torch.randn: "normal", torch.randint: "integers"}
_DRAW_NOTHING = frozenset({torch.zeros, torch.ones, torch.empty, torch.full})


def make_local(fn: Any, spec: DistSpec, args: Any, kwargs: Any) -> Any:
    """Returns this rank's piece of a random factory's tensor for the shape of ``spec``, or None for
    a factory that draws nothing.

    A factory that is not torch's own runs on the local shape, with generators seeded for this call
    and place.
    """
    if fn in _DRAW_NOTHING:
        return None
    axes, device = tuple(sorted(spec.layout.sharded)), spec.mesh.device
    if fn not in _DISTRIBUTIONS and fn is not torch.randperm:
        with fork_generators(spec.mesh, axes):
            return fn(spec.local_shape, *args, dtype=spec.dtype, device=device, **kwargs)
    unknown = [name for name in kwargs if name != "generator"]
    if unknown:
        raise TypeError(f"{fn.__name__} on a mesh: unknown argument {unknown[0]!r}")
    this = draw(spec.mesh, "invariant", kwargs.get("generator"))
    dtype, bounds = spec.dtype, dict[str, int]()
    if fn in (torch.randint, torch.randperm) and dtype == torch.get_default_dtype():
        dtype = torch.int64
    if fn is torch.randperm:
        whole = permutation(*this.key, math.prod(spec.shape), device).to(dtype)
        return whole[spec.local_box.slices].clone()
    if fn is torch.randint:  # (high), or (low, high)
        bounds = dict(zip(("low", "high"), (0, *args)[-2:], strict=True))
    if this.invariant:
        return this.numbers(_DISTRIBUTIONS[fn], spec, dtype, device, **bounds)
    with this.seeded(axes, device):
        return fn(*bounds.values(), spec.local_shape, dtype=dtype, device=device)
