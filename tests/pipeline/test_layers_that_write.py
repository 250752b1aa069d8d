"""Layers of other stages that write to their input or to a buffer that stages share. In one process
the caller sees such a write; a rank of the caller's stage cannot. Reads of the old value raise, on
all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import pipeline
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

WRITES = {
    "relu": lambda x: F.relu(x, inplace=True), "a view": lambda x: (x[1:].mul_(2), x)[1],
    "an item": lambda x: (x.__setitem__(0, 1.0), x)[1],
}  # fmt: skip
ORDERS = {None: [0, 1], "1f1b": [0, 1], "interleaved_1f1b": [0, 1, 0, 1], "zbv": [0, 1, 1, 0]}


class Layer(nn.Module):
    def __init__(self, seed, write=None, norm=None):
        super().__init__()
        self.linear, self.write, self.norm = nn.Linear(6, 6, bias=False).double(), write, norm
        with torch.no_grad():
            self.linear.weight.copy_(randn(6, 6, seed=seed))

    def forward(self, x):
        factor = getattr(x, "factor", 1.0)  # an attribute of the user
        x = self.linear(x if self.write is None else self.write(x)) * factor
        return x if self.norm is None else self.norm(x)


class Net(nn.Module):
    """The third layer of four, which begins a visit, writes to its input; ``reads``: the input is
    read again afterwards."""

    last = None

    def __init__(self, write=None, reads=False, norm=None):
        super().__init__()
        layers = [Layer(i, write if i == 2 else None, norm if i != 1 else None) for i in range(4)]
        self.layers, self.reads = nn.ModuleList(layers), reads

    def forward(self, x):
        h = self.layers[1](self.layers[0](x))
        h.factor = 2.0
        y = self.layers[3](self.layers[2](h))
        if self.reads:
            y = y * (h if self.last is None else dt.reshard(h, self.last))
        return (y**2).sum() / 100


class BatchOfRows(nn.BatchNorm1d):
    """Writes to its statistics only, by the function of torch."""

    def forward(self, x):
        stats = self.running_mean, self.running_var
        return F.batch_norm(x, *stats, self.weight, self.bias, self.training)


class InstanceNorm(nn.InstanceNorm1d):
    def __init__(self, n):
        super().__init__(n, affine=True, track_running_stats=True)
        del self.num_batches_tracked
        self.num_batches_tracked = None

    def forward(self, x):
        return super().forward(x.unsqueeze(-1).expand(-1, -1, 3) * torch.ones(3).double())[..., 0]


def run(net, batch, schedule, meshes):
    order = [meshes[i] for i in ORDERS[schedule]]
    pipeline.split(net.layers, order, of=net)
    net.last = order[-1]

    def step(rows):
        return net(dt.shard_tensor(rows, order[0]))

    if schedule is None:
        step(batch).backward()
    else:
        pipeline.run(step, [batch], schedule, stages=order if len(order) > 2 else None)


@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_an_input_that_is_not_read_again_may_be_written_to(schedule):
    batch, meshes = randn(4, 6, seed=9), stage_meshes()
    for write in (None, *WRITES.values()):
        plain, net = Net(write), Net(write)
        plain(batch).backward()
        run(net, batch, schedule, meshes)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            if p.is_initialized:
                torch.testing.assert_close(p.grad.to_local(), q.grad)


@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_an_input_that_was_written_to_is_not_read_again(schedule):
    batch, meshes = randn(4, 6, seed=9), stage_meshes()
    for write in WRITES.values():
        with pytest.raises(RuntimeError, match="input of a layer on another stage, which wrote"):
            run(Net(write, reads=True), batch, schedule, meshes)


@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_a_buffer_that_stages_share_is_written_to_on_its_own_stage_only(schedule):
    batch, meshes = randn(4, 6, seed=9), stage_meshes()
    with pytest.raises(RuntimeError, match=r"'norm.num_batches_tracked' of a Layer, which layers"):
        run(Net(norm=nn.BatchNorm1d(6).double()), batch, schedule, meshes)
    for norm in (nn.BatchNorm1d, BatchOfRows, InstanceNorm):
        if norm is not nn.BatchNorm1d:
            with pytest.raises(RuntimeError, match=r"'norm.running_mean' of a Layer, which layers"):
                run(Net(norm=norm(6).double()), batch, schedule, meshes)
        plain, net = Net(norm=norm(6).double()).eval(), Net(norm=norm(6).double()).eval()
        plain(batch).backward()
        run(net, batch, schedule, meshes)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            if p.is_initialized and p.grad is not None:
                torch.testing.assert_close(p.grad.to_local(), q.grad)
