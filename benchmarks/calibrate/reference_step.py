"""Small training steps on DistTensors, for measuring kernels and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from disttensor.api.shard import shard_tensor
from disttensor.comm.log import record_comms
from disttensor.comm.process_group import world
from disttensor.parallel.strategy import Strategy
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Event, Gradient, Op
from disttensor.simulate.recorder import StepRecorder
from disttensor.simulate.world import simulated_rank

_WIDTH, _ROWS, _BLOCKS = 32, 16, 4  # of a step in which kernels take no time
_SEQUENCE = 128  # rows that attend to each other
_STEPS = 20


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.dropout(self.out(y))
        return out


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.down(self.act(self.up(self.norm(x)))))
        return out


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = _Attention(width), _MLP(width)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        x = x + self.attention(x, **options)
        out: torch.Tensor = x + self.mlp(x)
        return out


class _Model(nn.Module):
    """A transformer without embeddings."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        x = rows
        for block in self.blocks:
            x = block(x, is_causal=False)
        return {"hidden": x, "loss": (x.float() - targets).square().mean()}


def of_kernel(device: Device, clock: Callable[[], float], together: bool) -> float:
    """Measures ``Device.launch``: the seconds of a training step that ``device`` does not explain
    by arithmetic, memory traffic and collectives, per kernel. Ranks that measure ``together``
    compete for the caches as they do in training."""
    with world_of_one(together):
        whole, rest, events = _timed(device, clock, sharded=False)
    return max(rest, 0.05 * whole) / sum(isinstance(e, Op) for e in events)


def of_gradient(device: Device, clock: Callable[[], float], together: bool) -> float:
    """Measures ``Device.gradient`` for a device with ``launch``: the other seconds of a step on
    sharded parameters, per gradient."""
    with world_of_one(together, ranks=2):
        _, rest, events = _timed(device, clock, sharded=True)
    rest -= device.launch * sum(isinstance(e, Op) for e in events)
    return max(rest, 0.0) / max(sum(isinstance(e, Gradient) for e in events), 1)


def _timed(
    device: Device, clock: Callable[[], float], sharded: bool
) -> tuple[float, float, list[Event]]:
    """Returns the median seconds of a step, the part that ``device`` does not explain, and the
    events of a step."""
    step = reference_step(_WIDTH, _ROWS, _BLOCKS, sharded=sharded)
    step()
    events = events_of(step)
    with record_comms() as comms:
        step()
    times = []
    for _ in range(_STEPS):
        start = clock()
        step()
        times.append(clock() - start)
    whole = median(times)
    known = sum(device.kernel(e) for e in events if isinstance(e, Op)) + len(comms) * device.post
    return whole, whole - known, events


@contextmanager
def world_of_one(together: bool, ranks: int = 1) -> Iterator[None]:
    """Lets this process act as the first of ``ranks`` ranks, without the others, unless it measures
    ``together`` with them."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if not together:
            stack.enter_context(simulated_rank(0, ranks, data=True))
        yield


def events_of(step: Callable[[], object]) -> list[Event]:
    """Returns the events of a step on tensors with data. Messages are sent, and not recorded."""
    recorder = StepRecorder()
    with recorder.running():
        recorder.start()
        step()
        recorder.stop()
    return recorder.events


def reference_step(
    width: int, rows: int, blocks: int, amp: torch.dtype | None = None, sharded: bool = False
) -> Callable[[], None]:
    """Returns a training step of a transformer on all ranks.

    Args:
        width: of a row.
        rows: rows of each rank.
        blocks: layers of the transformer.
        amp: the dtype of autocast, None for float32.
        sharded: whether the parameters are sharded or replicated.
    """
    ranks = world()[1]
    strategy = Strategy(sharding=ranks, zero_stage=3) if sharded else Strategy(dp=ranks)
    (mesh,) = strategy.stages()
    model, optimizer = strategy.apply(_Model(width, blocks).float(), torch.optim.AdamW)
    assert optimizer is not None
    sequence = min(rows, _SEQUENCE)
    batch = torch.ones(ranks * rows // sequence, sequence, width)

    def step() -> None:
        places = strategy.batch(sequence=None)
        given = {name: shard_tensor(batch, mesh, places) for name in ("rows", "targets")}
        with torch.autocast("cpu", amp, enabled=amp is not None):
            loss = model(**given)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step
