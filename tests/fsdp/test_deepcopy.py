"""Copies of a module under shard_data_parallel: averages of its parameters, target networks, and
copies that train on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import disttensor as dt
from tests.support.micro import batch_of, meshes, values
from tests.support.part import part
from tests.support.pool import on_ranks

OPTIONS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "reshard_after_forward": False, "segments": ["*"]},
    {"stage": 2, "param_dtype": torch.float64},
    {"stage": 1},
    {"shard_axis": None},
]


class Tied(nn.Module):
    """A tied weight, a buffer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.two.weight = self.one.weight
        self.shift = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.two(torch.tanh(self.one(x)))) * self.shift


def made(options: dict[str, Any] | None, mesh: Any) -> Tied:
    torch.manual_seed(0)
    model = Tied().double()
    if options is None:
        return model
    replicas = "dp" if mesh.ndim == 2 else None
    return dt.shard_data_parallel(model, mesh, replicate_axis=replicas, **options)


def step(model: nn.Module, loss: Any) -> None:
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sgd.zero_grad()
    loss.square().sum().backward()
    sgd.step()


def trains_on(model: nn.Module, x: list[Any]) -> list[nn.Module]:
    step(model, model(x[0]))
    clone = copy.deepcopy(model)
    assert all(p.grad is None for p in clone.parameters())
    step(clone, clone(x[1]) + model(x[1]).detach())
    step(model, model(x[2]))
    step(clone, clone(x[0]))
    return [model, clone]


def averaged_model(model: nn.Module, x: list[Any]) -> list[nn.Module]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(model)
    for i in range(3):
        step(model, model(x[i]))
        average.update_parameters(model)
        swa.update_parameters(model)
    return [model, average, swa]


def timm_ema(model: nn.Module, x: list[Any]) -> list[nn.Module]:
    ema = copy.deepcopy(model).eval()
    ema.requires_grad_(False)
    for i in range(3):
        step(model, model(x[i]))
        with torch.no_grad():
            pairs = zip(ema.state_dict().values(), model.state_dict().values(), strict=True)
            for average, now in pairs:
                average.copy_(0.9 * average + 0.1 * now)
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.1)
        assert not ema(x[i]).requires_grad
    return [model, ema]


def diffusers_ema(model: nn.Module, x: list[Any]) -> list[nn.Module]:
    shadow = [p.clone().detach() for p in model.parameters()]
    for i in range(3):
        step(model, model(x[i]))
        for average, now in zip(shadow, model.parameters(), strict=True):
            average.sub_(0.1 * (average - now.detach()))
    for p, average in zip(model.parameters(), shadow, strict=True):
        p.data.copy_(average.data)
    return [model]


def target_network(model: nn.Module, x: list[Any]) -> list[nn.Module]:
    """Its outputs are what the model is to predict, and it follows slowly. The copy of a copy."""
    target = copy.deepcopy(copy.deepcopy(model))
    for i in range(3):
        with torch.no_grad():
            wanted = target(x[i])
        step(model, model(x[i]) - wanted - 1)
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.5)
    target.load_state_dict(model.state_dict())
    step(target, target(x[0]))
    return [model, target]


PATTERNS: list[Callable[[nn.Module, list[Any]], list[nn.Module]]] = [
    trains_on, averaged_model, timm_ema, diffusers_ema, target_network,
]  # fmt: skip


def check(pattern: Any, mesh: Any, options: dict[str, Any]) -> None:
    found = []
    for how in (options, None):
        x = [batch_of(None if how is None else mesh, i) for i in range(3)]
        models = pattern(made(how, mesh), x)
        outputs = [m.eval()(x[0]) for m in models]
        found.append(values([*outputs, *[p for m in models for p in m.state_dict().values()]]))
        if how is not None:
            for m in models:
                dt.debugging.check_replicas(m)
                like = [p.placements for p in models[0].parameters()]
                assert [p.placements for p in m.parameters()] == like
    torch.testing.assert_close(
        *found, rtol=1e-9, atol=1e-10, msg=lambda m: f"{pattern} {mesh} {options}: {m}"
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(2, timeout=300)
def test_a_copy_holds_the_same_shards(pattern: Any) -> None:
    for options in OPTIONS:
        check(pattern, meshes()["fsdp"], options)


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(4, timeout=300)
def test_a_copy_beside_replicas(pattern: Any) -> None:
    for options in part(OPTIONS, 2, pattern.__name__):
        check(pattern, meshes()["dp x fsdp"], options)


@pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
@on_ranks(2)
def test_what_cannot_be_copied() -> None:
    model = made({"stage": 3, "segments": ["one", "two"]}, meshes()["fsdp"])
    with pytest.raises(RuntimeError, match=r"deepcopy copies a part .*Copy the module that"):
        copy.deepcopy(model.one)
    with pytest.raises(RuntimeError, match=r"cannot be pickled.*state_dict"):
        pickle.dumps(model)
    model.norm.register_forward_hook(lambda *_: copy.deepcopy(model) and None)
    with pytest.raises(RuntimeError, match=r"during its forward or backward.*between steps"):
        model(batch_of(meshes()["fsdp"], 0))


@on_ranks(2)
def test_a_copy_of_stages_on_two_meshes() -> None:
    """On a rank outside a mesh the copy shows copies of the stand-ins."""
    stages = [dt.ProcessMesh([r], ("dp",)) for r in range(2)]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = copy.deepcopy(plain)
    dt.shard_module(model[0], stages[0])
    dt.shard_module(model[2], stages[1])
    dt.shard_data_parallel(model, shard_axis="dp", param_dtype=torch.float64)
    clone = copy.deepcopy(model)
    x = batch_of(None, 0)

    def run(m: Any) -> Any:
        if m is plain:
            return m(x)
        hidden = m[1](m[0](dt.shard_tensor(x, stages[0], [dt.Replicate()])))
        return m[2](dt.reshard(hidden, stages[1], [dt.Replicate()]))

    for m in (plain, clone, model):
        run(m).square().sum().backward()
    for m in (clone, model):
        for p, q in zip(m.parameters(), plain.parameters(), strict=True):
            if p.is_initialized:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
