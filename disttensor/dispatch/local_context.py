"""MeshCollectives: the collectives and random numbers that local functions may use, on a mesh."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd import functional, halo_exchange
from disttensor.comm import collectives
from disttensor.layout import Axes
from disttensor.random import state

Tensor = torch.Tensor


class MeshCollectives:
    """``ops.local.Collectives`` over the axes of one mesh."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def _group(self, axes: Axes) -> collectives.Group | None:
        busy = tuple(a for a in axes if self.mesh.shape[a] > 1)
        return self.mesh.group(busy) if busy else None

    def psum(self, x: Tensor, axes: Axes) -> Tensor:
        return functional.psum(x, self._group(axes))

    def pvary(self, x: Tensor, axes: Axes) -> Tensor:
        return functional.pvary(x, self._group(axes)) if x.requires_grad else x

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return functional.all_gather(x, self._group(axes))

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"all_reduce of {op!r} has no gradient: psum has, or detach x")
        group = self._group(axes)
        return x if group is None else collectives.all_reduce(x, op, group)

    def fetch(
        self,
        x: Tensor,
        dim: int,
        have: halo_exchange.Ranges,
        want: halo_exchange.Ranges,
        axes: Axes,
    ) -> Tensor:
        return halo_exchange.fetch(x, dim, have, want, self._group(axes))

    def draw(self, default: str, generator: torch.Generator | None = None) -> state.Draw:
        return state.draw(self.mesh, default, generator)
