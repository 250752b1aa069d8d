"""Parameters of other tensor subclasses, as quantized weights: whole on each rank where they are
frozen, refused by name otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.dispatch import native
from tests.support.int8_tensor import Adapted, Int8Tensor
from tests.support.pool import fake_world, on_ranks

R, S0, S1 = dt.Replicate(), dt.Shard(0), dt.Shard(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(6, 10), nn.GELU(), Adapted(10, 3))


def data_parallel(stage: int) -> Callable[[nn.Module, dt.ProcessMesh], nn.Module]:
    return lambda net, mesh: dt.shard_data_parallel(net, mesh, shard_axis="a", stage=stage)


HOW: dict[str, Callable[[nn.Module, dt.ProcessMesh], nn.Module]] = {
    "replicated": dt.shard_module,
    "adapters split": lambda net, mesh: dt.shard_module(
        net, mesh, {"*.down.weight": [S0], "*.up.weight": [S1], "0.bias": [S0]}
    ),
    "no shards": lambda net, mesh: dt.shard_data_parallel(net, mesh, shard_axis=None),
    **{f"stage {n}": data_parallel(n) for n in (1, 2, 3)},
}


def train(net: nn.Module, data: Any) -> list[torch.Tensor]:
    losses = []
    for _ in range(3):
        loss = net(data).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(p.grad * 0.5)
                    p.grad = None
        losses.append(loss.detach())
    return losses


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_adapters_on_frozen_quantized_weights_train_as_in_one_process(how: str) -> None:
    mesh = dt.init_mesh((2,), ("a",))
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    plain = model()
    want = train(plain, batch)
    for in_c in (True, False):
        for placement in (S0, S1, R):
            net = model()
            if mesh.coordinate != (0,) and how.startswith(("stage", "no")):
                net[0].weight.numbers.add_(1)  # values come from the first rank
            net = HOW[how](net, mesh)
            with native.using(in_c):
                got = train(net, dt.shard_tensor(batch, mesh, [placement]))
            for loss, one in zip(got, want, strict=True):
                torch.testing.assert_close(loss.full_tensor(), one)
            for name, p in plain.named_parameters():
                mine = net.get_parameter(name)
                if name in ("0.weight", "2.weight"):
                    assert type(mine) is Int8Tensor and isinstance(mine, nn.Parameter)
                    assert mine.numbers.equal(p.numbers) and mine.scale.equal(p.scale)
                else:
                    torch.testing.assert_close(mine.full_tensor(), p)


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_a_call_whose_rule_would_split_a_quantized_weight_gathers_instead() -> None:
    mesh = dt.init_mesh((2,), ("a",))
    weight = Int8Tensor.quantized(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))
    plain = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    want = nn.functional.linear(plain, weight)
    want.sum().backward()
    for in_c in (True, False):
        with native.using(in_c):
            x = dt.shard_tensor(plain.detach(), mesh, [S1], requires_grad=True)
            nn.functional.linear(x, weight.dequantized())  # of the same shape and dtype
            out = nn.functional.linear(x, weight)
            out.sum().backward()
        torch.testing.assert_close(out.full_tensor(), want)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_what_cannot_stay_whole_is_refused_by_name_before_anything_is_changed() -> None:
    with fake_world(2):
        mesh = dt.init_mesh((2,), ("a",))
        weight = Int8Tensor.quantized(torch.ones(4, 6))
        for make in (
            lambda: dt.shard_tensor(weight, mesh, [S0]),
            lambda: dt.shard_tensor(nn.Parameter(weight, False), mesh),
            lambda: dt.from_local(weight, mesh, [S0]),
        ):
            with pytest.raises(TypeError, match="is a Int8Tensor, a tensor subclass"):
                make()
        net = model()
        before = [*net.parameters()]
        for plan in ({"0.weight": [S0], "0.bias": [S0]}, {"*.weight": [S0]}):
            with pytest.raises(ValueError, match=r"'0.weight' is a Int8Tensor.*out of the plan"):
                dt.shard_module(net, mesh, plan)
        net[2].weight = nn.Parameter(Int8Tensor(weight.numbers[:3], weight.scale[:3]))
        for shard in (dt.shard_module, *map(data_parallel, (1, 2, 3))):
            with pytest.raises(ValueError, match=r"'2.weight' is a Int8Tensor.*requires grad"):
                shard(net, mesh)
        after = [*net.parameters()]
        assert all(a is b for a, b in zip(before[:4], after[:4], strict=True))


def test_copies_are_as_before() -> None:
    with fake_world(2):
        mesh = dt.init_mesh((2,), ("a",))
        net = dt.shard_module(model(), mesh)
        assert type(copy.deepcopy(net)[0].weight) is Int8Tensor
