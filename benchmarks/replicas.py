"""The contestants of data_parallel.py: one GPT, whole steps of it by us and by torch, alike but for
the parallelism.

A side is a function of the settings that gives a Run, which is called for one step (zero_grad,
forward, backward, optimizer) on this rank's part of the batch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt

Batch = tuple[Tensor, ...]
Side = Callable[["Settings"], "Run"]
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

    It divides a sum: reduction="mean" counts the targets that are not to be ignored, of all ranks
    with us, of one with DDP.
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


def batches(settings: Settings) -> list[Batch]:
    """(ids, targets) of all ranks, for each micro-batch."""
    draw = torch.Generator().manual_seed(1)
    shape = (settings.micro, 2, settings.rows * dist.get_world_size(), settings.time)
    ids = torch.randint(VOCAB, shape, generator=draw)
    return [(one[0], one[1]) for one in ids]


class Run:
    """A model in training. ``window(last)``: the context of a micro-batch."""

    def __init__(
        self, model: nn.Module, data: Sequence[Batch], window: Callable[[bool], Any]
    ) -> None:
        self.model, self.data, self.window = model, data, window
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.zero_grad, self.update = self.optimizer.zero_grad, self.optimizer.step

    def forward(self, micro: int = 0) -> Tensor:
        return self.model(*self.data[micro]) / len(self.data)

    def __call__(self) -> Tensor:
        """A whole step. Gives the sum over micro-batches of this rank's loss: the mean over ranks
        is that of the batch."""
        self.zero_grad()
        total = torch.zeros(())
        for micro in range(len(self.data)):
            with self.window(micro == len(self.data) - 1):
                loss = self.forward(micro)
                loss.backward()
            total += _mean(loss)
        self.update()
        return total


def _mean(loss: Any) -> Tensor:
    """This rank's own loss: with us it holds a share of the whole."""
    if isinstance(loss, dt.DistTensor):
        return loss.to_local().detach() * dist.get_world_size()
    return loss.detach()


def ours(
    settings: Settings, *, shape: Sequence[int] = (), reduce: str = "scatter", **how: Any
) -> Run:
    """``how`` goes to shard_data_parallel. ``shape``: of the mesh; by default one axis."""
    mesh = dt.init_mesh(*_mesh(shape))
    split = [dt.Shard(0)] * mesh.ndim
    data = [tuple(dt.shard_tensor(x, mesh, split) for x in batch) for batch in batches(settings)]
    model = dt.shard_data_parallel(made(settings), mesh, **how)
    if len(data) == 1:
        return Run(model, data, lambda last: nullcontext())
    return Run(model, data, lambda last: dt.accumulate(model, last, reduce))


def ddp(settings: Settings, **how: Any) -> Run:
    model = DistributedDataParallel(made(settings), **how)
    return Run(model, _mine(settings), lambda last: nullcontext() if last else model.no_sync())


def fsdp(
    settings: Settings, *, shape: Sequence[int] = (), reduce: str = "", after_forward: bool = True
) -> Run:
    """FSDP2. ``reduce``: "none" keeps whole gradients until the last micro-batch, "scatter" leaves
    out all-reduces."""
    shape, names = _mesh(shape)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model: Any = made(settings)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=after_forward)

    def window(last: bool) -> Any:
        if reduce == "none":
            model.set_requires_gradient_sync(last)
        elif reduce == "scatter":
            model.set_requires_all_reduce(last)
        return nullcontext()

    return Run(model, _mine(settings), window)


def compiled(side: Side, settings: Settings) -> Run:
    """A side under torch.compile as each library recommends: DDP as a whole, FSDP2 by blocks, ours
    by ``dt.compile``, which finds the blocks itself."""
    run = side(settings)
    if any(isinstance(p, dt.DistTensor) for p in run.model.parameters()):
        run.model = dt.compile(run.model)
    elif isinstance(run.model, DistributedDataParallel):
        run.model = torch.compile(run.model)  # type: ignore[assignment]
    else:
        for block in run.model.blocks:  # type: ignore[union-attr]
            block.compile()
    return run


def _mesh(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    shape = tuple(shape) or (dist.get_world_size(),)
    return shape, ("rep", "fsdp")[-len(shape) :]


def _mine(settings: Settings) -> list[Batch]:
    """This rank's part of the batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [tuple(x.chunk(n)[rank] for x in batch) for batch in batches(settings)]


def on_ranks(worlds: Iterable[int], rank_main: Callable[..., None], args: Any) -> dict[Any, Any]:
    """What ``rank_main(rank, world, port, args, results)`` of the processes of each world leaves in
    ``results``."""
    with mp.Manager() as manager:
        results = manager.dict()
        for n in worlds:
            mp.spawn(rank_main, (n, free_port(), args, results), nprocs=n)
        return dict(results)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


BLOCKS = ["blocks.*"]
zero3 = partial(ours, shard_axis="fsdp", stage=3, segments=BLOCKS)
kept = partial(zero3, reshard_after_forward=False)
