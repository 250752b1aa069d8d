"""A small model in segments, trained over micro-batches: on one process, and sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import ProcessMesh, Shard
from tests.support.oracle import randn

WIDTH, HIDDEN, BATCH = 5, 7, 5  # uneven over 2 and over 4
BLOCKS, MICRO, STEPS = 3, 3, 2


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, and a segment of the root: two parameters, one used first and one last.

    around  blocks are called through torch.utils.checkpoint
    """

    around = False

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Parameter(torch.ones(3, width))

    def forward(self, x: Any) -> Any:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x @ self.head.t()


def net(dtype: torch.dtype = torch.float64, **sizes: int) -> Net:
    """The same values on every rank."""
    model = Net(**sizes).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(randn(*p.shape, seed=i) * 0.3)
    return model


def meshes() -> dict[str, ProcessMesh]:
    """1-D, or dp x fsdp."""
    ranks = torch.arange(dist.get_world_size())
    out = {"fsdp": ProcessMesh(ranks, ("fsdp",))}
    if len(ranks) == 4:
        out["dp x fsdp"] = ProcessMesh(ranks.view(2, 2), ("dp", "fsdp"))
    return out


def shard(model: Net, mesh: ProcessMesh, **options: Any) -> Net:
    options.setdefault("segments", [f"blocks.{i}" for i in range(len(model.blocks))])
    replicas = "dp" if "dp" in mesh.dim_names else None
    return dt.shard_data_parallel(model, mesh, replicate_axis=replicas, **options)


def batch_of(mesh: ProcessMesh | None, seed: int, rows: int = BATCH, width: int = WIDTH,
             dtype: torch.dtype = torch.float64) -> Any:  # fmt: skip
    x = randn(rows, width, seed=seed).to(dtype)
    return x if mesh is None else dt.shard_tensor(x, mesh, [Shard(0)] * mesh.ndim)


def step_of(
    model: Net, mesh: ProcessMesh | None, seed: int, reduce: str | None, micro: int = MICRO,
    each: Callable[[int], Any] | None = None,
) -> list[Any]:  # fmt: skip
    """The losses of the micro-batches; gradients are left on the parameters. reduce: None for no
    context."""
    losses = []
    for i in range(micro):
        last = i == micro - 1
        scope: Any = contextlib.nullcontext()
        if mesh is not None and reduce is not None:
            scope = dt.accumulate(model, last=last, reduce=reduce)
        with scope:
            batch = batch_of(mesh, 100 * seed + i).to(next(model.parameters()).dtype)
            loss = model(batch).square().sum() / (BATCH * micro)
            loss.backward()
        losses.append(loss)
        if each is not None:
            each(i)
    return losses


def values(tensors: Sequence[Any]) -> list[Tensor]:
    whole = (t.full_tensor() if isinstance(t, dt.DistTensor) else t for t in tensors)
    return [t.detach().clone() for t in whole]
