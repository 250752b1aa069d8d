"""The sides of the comparison, behind one small interface, so that a case is written once.

A side sits on a mesh of fake ranks (PyTorch's ``fake`` process group: this process is rank 0 and
every collective returns at once) and places tensors there. ``layout`` has an entry per mesh axis:
the tensor dim that it splits, or None for a replica. The plain side takes rank 0's piece, so that
every side computes on local tensors of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.testing._internal.distributed.fake_pg import FakeStore

try:
    import disttensor as dt
    from disttensor.dispatch import native
except ImportError:  # its columns stay blank
    dt = native = None

WORLD = 8
DEVICE = "cpu"  # overhead.py --device
PLAIN, OURS, THEIRS = "plain", "disttensor", "DTensor"
IN_C = "disttensor (C)"
REPLAYED = "disttensor (replay)"
PLAIN_COMPILED, OURS_COMPILED = "plain, compiled", "disttensor, compiled"

Layout = Sequence[int | None]


def start_fake_world() -> None:
    """Rank 0 of a world of eight whose collectives do nothing; and one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())


def first_piece(full: Tensor, mesh_shape: Sequence[int], layout: Layout) -> Tensor:
    """What rank 0 holds of ``full``: the first chunk of each split dim."""
    for size, dim in zip(mesh_shape, layout, strict=True):
        if dim is not None:
            full = full.chunk(size, dim)[0]
    return full.contiguous().to(DEVICE)


class Plain:
    """Local tensors and nothing else: the bound that the others are measured against."""

    name = PLAIN

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh_shape = mesh_shape

    @staticmethod
    def around() -> AbstractContextManager[None]:
        """What the calls of this side run in."""
        return nullcontext()

    def place(self, full: Tensor, *layout: int | None) -> Tensor:
        return first_piece(full, self.mesh_shape, layout)

    def replicate(self, module: nn.Module) -> nn.Module:
        return module.to(DEVICE)

    def shard(self, module: nn.Module, plan: Mapping[str, int]) -> nn.Module:
        raise NotImplementedError("the hand-written module stands in for this")

    def forward(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The forward of a step, as this side runs it."""
        return function

    def gather(self, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
        return lambda x: _Gather.apply(x, group, math.prod(self.mesh_shape))

    def to_local(self, x: Tensor) -> Tensor:
        return x


class Ours(Plain):
    """disttensor, in Python alone."""

    name = OURS

    @staticmethod
    def around() -> AbstractContextManager[None]:
        return native.using(False)

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(mesh_shape)
        ranks = torch.arange(math.prod(mesh_shape)).reshape(mesh_shape).tolist()
        self.mesh = dt.ProcessMesh(ranks, axis_names(mesh_shape), DEVICE)

    def place(self, full: Tensor, *layout: int | None) -> Tensor:
        return dt.shard_tensor(full.to(DEVICE), self.mesh, self._placements(layout))

    def replicate(self, module: nn.Module) -> nn.Module:
        return dt.shard_module(module.to(DEVICE), self.mesh, {})

    def shard(self, module: nn.Module, plan: Mapping[str, int]) -> nn.Module:
        named = {name: self._placements([dim]) for name, dim in plan.items()}
        return dt.shard_module(module.to(DEVICE), self.mesh, named)

    def gather(self, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
        whole = self._placements([None] * len(self.mesh_shape))
        return lambda x: dt.reshard(x, self.mesh, whole)

    def to_local(self, x: Any) -> Tensor:
        return x.to_local()

    def _placements(self, layout: Layout) -> list[Any]:
        return [dt.Replicate() if dim is None else dt.Shard(dim) for dim in layout]


class InC(Ours):
    """disttensor with its C code."""

    name = IN_C

    @staticmethod
    def around() -> AbstractContextManager[None]:
        return native.using(True)


class Replayed(InC):
    """The same, its forward recorded and run as straight-line code."""

    name = REPLAYED

    def forward(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return dt.replay(function)


class PlainCompiled(Plain):
    """Plain PyTorch under torch.compile."""

    name = PLAIN_COMPILED

    def forward(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.compile(function, dynamic=False)


class OursCompiled(InC):
    """disttensor under its own ``compile``."""

    name = OURS_COMPILED

    def forward(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.compiled = dt.compile(function)
        return self.compiled


def contestants(replay: bool) -> list[type[Plain]]:
    """All sides that can run here. ``replay``: is there a forward to record?"""
    ours = [] if dt is None else [Ours] if native.module is None else [Ours, InC]
    recorded = [Replayed, OursCompiled] if dt is not None and replay else []
    return [Plain, *ours, *recorded, *[PlainCompiled] * replay, Theirs]


class Theirs(Plain):
    """torch.distributed.tensor."""

    name = THEIRS

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(mesh_shape)
        ranks = torch.arange(math.prod(mesh_shape)).reshape(mesh_shape)
        self.mesh = DeviceMesh(DEVICE, ranks, mesh_dim_names=axis_names(mesh_shape))

    def place(self, full: Tensor, *layout: int | None) -> Tensor:
        piece = first_piece(full, self.mesh_shape, layout)
        return DTensor.from_local(piece, self.mesh, self._placements(layout), run_check=False)

    def replicate(self, module: nn.Module) -> nn.Module:
        return distribute_module(module.to(DEVICE), self.mesh)

    def shard(self, module: nn.Module, plan: Mapping[str, int]) -> nn.Module:
        for name, param in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            placed = nn.Parameter(self.place(param.detach(), plan.get(name)))
            module.get_submodule(owner).register_parameter(leaf, placed)
        return module

    def gather(self, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
        whole = self._placements([None] * len(self.mesh_shape))
        return lambda x: x.redistribute(self.mesh, whole)

    def to_local(self, x: Any) -> Tensor:
        return x.to_local()

    def _placements(self, layout: Layout) -> list[Any]:
        return [Replicate() if dim is None else Shard(dim) for dim in layout]


def axis_names(mesh_shape: Sequence[int]) -> tuple[str, ...]:
    return tuple("xy"[: len(mesh_shape)])


class _Gather(torch.autograd.Function):
    """S(0) -> R by hand: one all-gather; the backward slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.rows = x.shape[0]
        full = x.new_empty(size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(full, x.contiguous(), group=group)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rank = dist.get_rank()
        return grad[rank * ctx.rows : (rank + 1) * ctx.rows], None, None
