"""MeshCollectives: collectives and random numbers for local functions, on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from disttensor import observe
from disttensor.autograd import activation_checkpoint, functional, halo_exchange
from disttensor.autograd.grad_types import GradType, reshard_local
from disttensor.comm import collectives
from disttensor.comm.groups import Group
from disttensor.comm.work import finished
from disttensor.core.layout import Axes, Layout
from disttensor.core.spec import DistSpec
from disttensor.observe import observers
from disttensor.random import draws

Tensor = torch.Tensor
T = TypeVar("T")


def _step(func: Callable[..., Tensor], *args: Any) -> Tensor:
    """Runs a function that communicates, which observers see."""
    return observe.run_step(func, *args) if observers else func(*args)


class MeshCollectives:
    """Implements ``ops.local.Collectives`` over the axes of one mesh."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def _group(self, axes: Axes) -> Group | None:
        busy = tuple(a for a in axes if self.mesh.shape[a] > 1)
        return self.mesh.group(busy) if busy else None

    def psum(self, x: Tensor, axes: Axes) -> Tensor:
        return _step(functional.psum, x, self._group(axes))

    def pvary(self, x: Tensor, axes: Axes) -> Tensor:
        return _step(functional.pvary, x, self._group(axes)) if x.requires_grad else x

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return _step(functional.all_gather, x, self._group(axes))

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"all_reduce of {op!r} has no gradient: psum has, or detach x")
        group = self._group(axes)
        return x if group is None else _step(collectives.all_reduce, x, op, group)

    def fetch(
        self,
        x: Tensor,
        dim: int,
        have: halo_exchange.Ranges,
        want: halo_exchange.Ranges,
        axes: Axes,
    ) -> Tensor:
        return halo_exchange.fetch(x, dim, have, want, self._group(axes))

    def exchange(self, pieces: Sequence[Tensor], numels: Sequence[int], axes: Axes) -> Any:
        group = self._group(axes)
        if group is None:
            return finished([pieces[0].reshape(-1)])
        return collectives.start_async(collectives.all_to_all, pieces, numels, group)

    def exchange_rows(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes
    ) -> Tensor:
        group = self._group(axes)
        return rows if group is None else collectives.all_to_all_rows(rows, sent, received, group)

    def once(self, make: Callable[[], T]) -> T:
        run = activation_checkpoint.current_run()
        if run is None:
            return make()
        kept: T | None = activation_checkpoint.repeated_note(run)
        made = make() if kept is None else kept
        activation_checkpoint.add_note(run, made)
        return made

    def reshard(
        self, x: Tensor, shape: Sequence[int], have: Layout, want: Layout, axes: Axes
    ) -> Tensor:
        src, dst = (
            GradType(
                DistSpec(self.mesh, layout, shape, x.dtype),
                tuple(sorted(set(axes) - layout.varies())),
            )
            for layout in (have, want)
        )
        return reshard_local(x, src, dst, None)

    def draw(self, default: str, generator: torch.Generator | None = None) -> draws.RandomDraw:
        return draws.draw(self.mesh, default, generator)
