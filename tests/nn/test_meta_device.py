"""The meta-device flow: a model without memory gets its layout, then its memory, then values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.tensor.dist_tensor import DistTensor
from tests.support.layouts import same
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

R, S = Replicate(), Shard


class Net(nn.Module):
    """A parameter and a buffer of the model's own beside layers, all set by ``init_weights``."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.empty(7))
        self.register_buffer("shift", torch.empty(7))

    def init_weights(self):
        self.up.reset_parameters()
        self.down.reset_parameters()
        nn.init.constant_(self.scale, 0.5)
        self.shift.copy_(torch.arange(7.0))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.scale + self.shift)


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def placed(mesh):
    """The model on the meta device, each tensor distributed, as torch's flow has it."""
    with torch.device("meta"):
        model = Net()
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None:
                    table[name] = dt.shard_tensor(x, mesh, [S(0)])
    for x in tensors(model):
        assert x.is_meta and x.device.type == "meta" and x.to_local().is_meta
        assert x.placements == (S(0),) and x.to_local().shape == x.spec.local_shape
    assert isinstance(model.scale, nn.Parameter) and model.scale.requires_grad
    return model


def initialized(model):
    """With memory and the numbers of one process."""
    dt.manual_seed(7)
    with torch.no_grad():
        model.init_weights()
    return model


def steps(model, data):
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(2):
        sgd.zero_grad()
        model(data(randn(6, 5, seed=i, dtype=torch.float32))).square().mean().backward()
        sgd.step()
    return [x.full_tensor() if isinstance(x, DistTensor) else x for x in tensors(model)]


def reference():
    """A replicated model, made on the CPU: the numbers of one process."""
    model = initialized(dt.shard_module(Net(), line()))
    plain = Net()
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    return plain


@on_ranks(2)
def test_distributed_then_memory_then_values():
    plain = reference()
    model = placed(line())
    specs = [x.spec for x in tensors(model)]
    model.to_empty(device="cpu")
    assert [x.spec for x in tensors(model)] == specs
    assert not any(x.is_meta for x in tensors(model))
    initialized(model)
    same(tensors(model), tensors(plain))
    got = steps(model, lambda x: dt.shard_tensor(x, line(), [S(0)]))
    same(got, steps(plain, lambda x: x))


@pytest.mark.parametrize("stage", [1, 2, 3, None])
@pytest.mark.parametrize("first", ["layout", "shards"])
@on_ranks(2)
def test_to_empty_under_shard_data_parallel(stage, first):
    plain = reference()
    model = placed(line()) if stage is None else replicated(line())
    if first == "layout":
        model.to_empty(device="cpu")
    axis = None if stage is None else line().dim_names[0]
    model = dt.shard_data_parallel(model, line(), axis, stage=stage or 3)
    params = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    initialized(model)
    same(tensors(model), tensors(plain))
    got = steps(model, lambda x: dt.shard_tensor(x, line(), [S(0)]))
    same(got, steps(plain, lambda x: x))


def replicated(mesh):
    """The model replicated, on the meta device."""
    with torch.device("meta"):
        model = Net()
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({k: dt.shard_tensor(x, mesh) for k, x in table.items() if x is not None})
    return model


@on_ranks(2)
def test_what_else_is_on_the_meta_device():
    meta = torch.empty(5, 3, device="meta")
    x = dt.shard_tensor(meta, line(), [S(0)], dtype=torch.float16, requires_grad=True)
    assert (x.dtype, x.shape, x.requires_grad, x.is_leaf) == (torch.float16, (5, 3), True, True)
    for placements in ([S(1)], [R], [dt.Partial()]):
        assert dt.shard_tensor(meta, line(), placements).to_local().is_meta
    piece = torch.empty(dt.zeros(5, 3, mesh=line(), placements=[S(0)]).to_local().shape)
    for shape in (None, (5, 3)):
        x = dt.from_local(piece.to("meta"), line(), [S(0)], shape=shape)
        assert x.is_meta and x.shape == (5, 3) and torch.empty_like(x, device="cpu").spec is x.spec
    for options in ({"src_rank": 0}, {"check": True}):
        with pytest.raises(TypeError, match="on the meta device"):
            dt.shard_tensor(meta, line(), **options)
    model = dt.shard_module(placed(line()), line())  # what is distributed stays
    assert all(x.is_meta for x in tensors(model))
    with torch.device("meta"):
        half = nn.Sequential(nn.Linear(3, 3), Net())
    with pytest.raises(ValueError, match=r"scale is on the meta device.*init=function"):
        dt.shard_data_parallel(half, line(), line().dim_names[0])
    first, _ = stage_meshes()
    x = dt.shard_tensor(meta, first)
    assert torch.empty_like(x, device="cpu").spec is x.spec
