"""The contestants of data_parallel.py: one GPT, whole steps of it by us and by torch, alike but for the parallelism.

A side is a function of (world, settings) that gives a call: one step (zero_grad, forward, backward, optimizer) on this rank's
part of the batch, whose result is this rank's contribution to the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt

Step = Callable[[], Tensor]
Side = Callable[["Settings"], tuple[Step, nn.Module]]
VOCAB, HEAD_SIZE = 512, 64


@dataclass(frozen=True)
class Settings:
    """The model, and the batch of one rank and micro-batch."""

    width: int = 384
    depth: int = 4
    rows: int = 1
    time: int = 64
    micro: int = 1  # micro-batches of a step

    @property
    def numel(self) -> int:
        """Of all parameters."""
        return sum(p.numel() for p in GPT(self).parameters())


class Block(nn.Module):
    """[B, T, width] -> the same: causal attention and a GELU MLP, each behind a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """ids [B, T] and targets [B, T] -> the mean cross-entropy.

    It divides a sum: reduction="mean" counts the targets that are not to be ignored, of all ranks with us, of one with DDP.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.token = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(settings.time, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(settings.depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / targets.numel()


def made(settings: Settings) -> GPT:
    """The same weights in every process."""
    torch.manual_seed(0)
    return GPT(settings)


def batches(settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """(ids, targets) of all ranks, for each micro-batch."""
    draw = torch.Generator().manual_seed(1)
    shape = (settings.micro, 2, settings.rows * dist.get_world_size(), settings.time)
    ids = torch.randint(VOCAB, shape, generator=draw)
    return [(one[0], one[1]) for one in ids]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def ours(
    settings: Settings, *, shape: tuple[int, ...] = (), reduce: str = "scatter", **how: Any
) -> tuple[Step, nn.Module]:
    """``how`` goes to shard_data_parallel. ``shape``: of the mesh; by default one axis."""
    shape = shape or (dist.get_world_size(),)
    mesh = dt.init_mesh(shape, ("rep", "fsdp")[-len(shape) :])
    placements = [dt.Shard(0)] * mesh.ndim
    data = [
        tuple(dt.shard_tensor(x, mesh, placements) for x in batch) for batch in batches(settings)
    ]
    model = dt.shard_data_parallel(made(settings), mesh, **how)
    opt = optimizer(model)

    def step() -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for i, batch in enumerate(data):
            many = len(data) > 1
            with dt.accumulate(model, i == len(data) - 1, reduce) if many else nullcontext():
                loss = model(*batch) / len(data)
                loss.backward()
            total += loss.to_local().detach() * dist.get_world_size()
        opt.step()
        return total

    return step, model


def _mine(settings: Settings) -> list[tuple[Tensor, ...]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    return [tuple(x.chunk(n)[rank] for x in batch) for batch in batches(settings)]


def ddp(settings: Settings, **how: Any) -> tuple[Step, nn.Module]:
    data = _mine(settings)
    model = DistributedDataParallel(made(settings), **how)
    return _stepping(model, data, lambda last: nullcontext() if last else model.no_sync()), model


def fsdp(
    settings: Settings, *, shape: tuple[int, ...] = (), reduce: str = "", after_forward: bool = True
) -> tuple[Step, nn.Module]:
    """FSDP2. ``reduce``: "none" keeps whole gradients until the last micro-batch, "scatter" leaves out all-reduces."""
    shape = shape or (dist.get_world_size(),)
    names = ("rep", "fsdp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = _mine(settings)
    model: Any = made(settings)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=after_forward)

    def window(last: bool) -> Any:
        if reduce == "none":
            model.set_requires_gradient_sync(last)
        elif reduce == "scatter":
            model.set_requires_all_reduce(last)
        return nullcontext()

    return _stepping(model, data, window), model


def _stepping(
    model: nn.Module, data: list[tuple[Tensor, ...]], window: Callable[[bool], Any]
) -> Step:
    opt = optimizer(model)

    def step() -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for i, batch in enumerate(data):
            with window(i == len(data) - 1):
                loss = model(*batch) / len(data)
                loss.backward()
            total += loss.detach()
        opt.step()
        return total

    return step


BLOCKS = ["blocks.*"]
zero3 = partial(ours, shard_axis="fsdp", stage=3, segments=BLOCKS)
kept = partial(zero3, reshard_after_forward=False)
