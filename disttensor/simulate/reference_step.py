"""A small training step on DistTensors, by which kernels and the host are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from disttensor.simulate.events import Event, Op
from disttensor.simulate.recorder import Recorder
from disttensor.simulate.world import imagined_rank

_WIDTH, _ROWS, _BLOCKS = 32, 16, 4  # of a step that is the host's alone
_SEQUENCE = 128  # rows that attend to each other
_STEPS = 20


class _Block(nn.Module):
    """Of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

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
    with world_of_one(together):
        step = reference_step(_WIDTH, _ROWS, _BLOCKS)
        step()
        ops = [e for e in events_of(step) if isinstance(e, Op)]
        times = []
        for _ in range(_STEPS):
            start = clock()
            step()
            times.append(clock() - start)
    whole = median(times)
    return max(whole - sum(map(device.kernel, ops)), 0.05 * whole) / len(ops)


@contextmanager
def world_of_one(together: bool) -> Iterator[None]:
    """Inside, this process is alone, unless it works ``together`` with the others."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if not together:
            stack.enter_context(imagined_rank(0, 1, data=True))
        yield


def events_of(step: Callable[[], object]) -> list[Event]:
    """Of a step on tensors with data: no messages, as those are sent."""
    recorder = Recorder()
    with recorder.running():
        recorder.start()
        step()
        recorder.stop()
    return recorder.events


def reference_step(
    width: int, rows: int, blocks: int, amp: torch.dtype | None = None
) -> Callable[[], None]:
    """Of a transformer on replicas, each with so many rows; under autocast with ``amp``."""
    ranks = world()[1]
    mesh = init_mesh((ranks,), ("ranks",))
    model = shard_module(nn.Sequential(*[_Block(width) for _ in range(blocks)]).float(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    sequence = min(rows, _SEQUENCE)
    batch = torch.ones(ranks * rows // sequence, sequence, width)
    x = shard_tensor(batch, mesh, [Shard(0)])

    def step() -> None:
        with torch.autocast("cpu", amp, enabled=amp is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step
