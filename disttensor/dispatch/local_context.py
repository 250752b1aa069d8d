"""What local functions may ask of the mesh: collectives over its axes, and random numbers
(``ops.local.Reach``)."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.autograd import halo_exchange
from disttensor.autograd.functional import Psum
from disttensor.comm import collectives
from disttensor.layout import Axes
from disttensor.random import state

Tensor = torch.Tensor


class MeshReach:
    """The collectives that local functions may use (``ops.local.Reach``), on the axes of one
    mesh."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def _group(self, axes: Axes) -> collectives.Group | None:
        busy = tuple(a for a in axes if self.mesh.shape[a] > 1)
        return self.mesh.group(busy) if busy else None

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        group = self._group(axes)
        if group is None:
            return x
        if op == "sum" and x.requires_grad and torch.is_grad_enabled():
            return Psum.apply(x, group)
        return collectives.all_reduce(x, op, group)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        group = self._group(axes)
        return x.detach().unsqueeze(0) if group is None else collectives.all_gather(x, group)

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
