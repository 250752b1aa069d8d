"""Measures the host's time for a visit of a micro-batch, and for a collective or a message, by a
small pipeline.

Each rank of the running world is a stage, which wakes for each message with cold caches. A process
that measures alone is the first of two simulated stages.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from disttensor import pipeline
from disttensor.api.shard import reshard, shard_tensor
from disttensor.comm import collectives
from disttensor.comm.groups import world_group
from disttensor.comm.process_group import world
from disttensor.core.init_mesh import init_mesh
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Replicate, Shard
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Op
from disttensor.simulate.world import simulated_rank

from .reference_step import events_of

_FEW, _MANY = 2, 10  # micro-batches
_LAYERS, _WIDTH, _ROWS = 2, 128, 128  # layers of a stage
_STEPS, _COLLECTIVES = 10, 50


def of_collective(clock: Callable[[], float], together: bool) -> float:
    """Measures ``Device.post``: seconds of the host for a collective."""
    return _measured(lambda: _collective(clock), together)


def of_micro_batch(device: Device, clock: Callable[[], float], together: bool) -> float:
    """Measures ``Device.visit`` for a device whose other times are known."""
    return _measured(lambda: _visit(device, clock), together)


def _measured(find: Callable[[], float], together: bool) -> float:
    """Returns the mean of all ranks if they measure ``together``, else the result of this process
    as the first of two."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        if together and world()[1] > 1:
            found = torch.tensor(find(), dtype=torch.float64)
            return float(collectives.all_reduce(found, "avg", world_group()))
        with simulated_rank(0, 2, data=True):
            return find()


def _visit(device: Device, clock: Callable[[], float]) -> float:
    """Returns the host's seconds for a visit: the difference between many and few micro-batches. A
    visit has two messages, at the first and the last stage one."""
    few, many = _pipeline(_FEW), _pipeline(_MANY)
    more = _kernels(device, many) - _kernels(device, few)
    times = []
    for _ in range(_STEPS):
        begin = clock()
        few()
        middle = clock()
        many()
        times.append(clock() - middle - (middle - begin))
    rank, ranks = world()
    visit = (median(times) - more) / (2 * (_MANY - _FEW))
    messages = 1 if rank in (0, ranks - 1) else 2
    return max(visit - messages * device.post, 0.1 * visit, 0.0)


def _collective(clock: Callable[[], float]) -> float:
    mesh = init_mesh((world()[1],), ("ranks",))
    x = shard_tensor(torch.ones(world()[1]), mesh, [Shard(0)])
    reshard(x, mesh, [Replicate()])
    start = clock()
    for _ in range(_COLLECTIVES):
        reshard(x, mesh, [Replicate()])
    return (clock() - start) / _COLLECTIVES


def _kernels(device: Device, step: Callable[[], object]) -> float:
    """Returns the seconds of the kernels, of device and host together."""
    return sum(device.kernel(e) + device.launch for e in events_of(step) if isinstance(e, Op))


def _pipeline(micro_batches: int) -> Callable[[], None]:
    ranks = world()[1]
    stages = [ProcessMesh((r,), ("one",)) for r in range(ranks)]
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS * ranks)]
    model = nn.Sequential(*layers).float()
    pipeline.split(model, stages)
    rows = torch.ones(micro_batches, _ROWS, _WIDTH)
    targets = torch.zeros(_ROWS, dtype=torch.long)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        x = shard_tensor(part, stages[0], [Shard(0)])
        y = shard_tensor(targets, stages[-1], [Shard(0)])
        return F.cross_entropy(model(x), y)

    def step() -> None:
        pipeline.run(loss_of, rows, stages=stages)
        for parameter in model.parameters():
            parameter.grad = None

    step()
    step()
    return step
