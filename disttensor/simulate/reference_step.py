"""A small training step on DistTensors, by which is measured what the host takes for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from disttensor.comm.process_group import world
from disttensor.create import shard_tensor
from disttensor.mesh import init_mesh
from disttensor.nn.shard_module import shard_module
from disttensor.placement import Shard
from disttensor.simulate.device import Device
from disttensor.simulate.events import Op
from disttensor.simulate.recorder import Recorder
from disttensor.simulate.world import imagined_rank

_WIDTH, _ROWS, _BLOCKS = 128, 128, 4
_STEPS = 20


class _Block(nn.Module):
    """Of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


def host_seconds(device: Device, clock: Callable[[], float], together: bool) -> float:
    """What a kernel of a training step takes beside what ``device`` says of its arithmetic and its
    memory traffic, by the median step: of a world of one, or ``together`` with the other ranks,
    which put Python out of the caches as they do in training."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if not together:
            stack.enter_context(imagined_rank(0, 1, data=True))
        step = _step()
        recorder = Recorder()
        with recorder.running():
            step()
            recorder.start()
            step()
            recorder.stop()
        ops = [e for e in recorder.events if isinstance(e, Op)]
        times = []
        for _ in range(_STEPS):
            start = clock()
            step()
            times.append(clock() - start)
    kernels = sum(device.seconds(e.flops, e.nbytes, e.dtype) for e in ops)
    whole = median(times)
    return max(whole - kernels, 0.05 * whole) / len(ops)


def _step() -> Callable[[], None]:
    ranks = world()[1]
    mesh = init_mesh((ranks,), ("ranks",))
    model = shard_module(nn.Sequential(*[_Block() for _ in range(_BLOCKS)]).float(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = shard_tensor(torch.ones(ranks, _ROWS, _WIDTH), mesh, [Shard(0)])

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step
