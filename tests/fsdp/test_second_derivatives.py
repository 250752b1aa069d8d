"""Gradients of gradients under data parallelism: penalties, meta-learning, and optimizers that
estimate the Hessian, compared with one process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from tests.support.micro import batch_of, meshes, values
from tests.support.part import part
from tests.support.pool import on_ranks

OPTIONS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "reshard_after_forward": False},
    {"stage": 3, "segments": ["*"]},
    {"stage": 2},
    {"stage": 1},
    {"shard_axis": None},
    {},  # plain data parallelism: no shard_data_parallel
]


class Critic(nn.Module):
    """``scale`` is in the segment of the root."""

    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.one, self.two, self.out = nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.one(x * self.scale))
        x = checkpoint(self.two, x, use_reentrant=False) if self.recompute else self.two(x)
        return self.out(torch.tanh(x))


Step = Callable[[nn.Module, list[Any], torch.optim.Optimizer], None]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    STEPS[function.__name__] = function
    return function


@step
def gradients_returned(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    params = list(model.parameters())
    loss = model(batches[0]).square().sum()
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g


@step
def some_gradients_returned(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    """Beside gradients that add up, of parameters that are used in two ways."""
    ours: Any = model
    loss = model(batches[0]).square().sum() + ours.one.weight.square().sum()
    wanted = [ours.one.weight, ours.out.bias]
    found = torch.autograd.grad(loss, wanted, retain_graph=True)
    loss.backward()
    for p, g in zip(wanted, found, strict=True):
        p.grad = p.grad + g * 0.5
    with pytest.raises(RuntimeError, match=r"used in the graph"):
        torch.autograd.grad(ours.one(batches[0]).sum(), [ours.out.bias])


@step
def gradient_penalty(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    """The penalty first, then forwards of real and generated samples, and one backward."""
    x = batches[0].detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (g.square().sum(1).sqrt() - 1).square().mean()
    (model(batches[1]).mean() - model(batches[2]).mean() + penalty * 10).backward()


@step
def penalty_of_collected_gradients(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    model(batches[0]).square().sum().backward()
    model(batches[1]).square().sum().backward(create_graph=True)
    penalty: Any = sum(p.grad.square().sum() for p in model.parameters())  # type: ignore[union-attr]
    sgd.zero_grad()
    (penalty * 0.01 + model(batches[2]).square().sum()).backward()


@step
def adahessian(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    model(batches[0]).square().sum().backward(create_graph=True)
    params = list(model.parameters())
    grads: Any = [p.grad for p in params]
    assert all(g.requires_grad for g in grads)
    for seed in range(2):
        v = [torch.ones_like(p) * (seed + 1) for p in params]
        found = torch.autograd.grad(grads, params, v, retain_graph=True)
        for p, h in zip(params, found, strict=True):
            p.grad = p.grad.detach() + h.abs()


@step
def sophia(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    params = list(model.parameters())
    grads = torch.autograd.grad(model(batches[0]).square().sum(), params, create_graph=True)
    product: Any = sum((g * 0.5).sum() for g in grads)
    model(batches[1]).square().sum().backward()
    for p, h in zip(params, torch.autograd.grad(product, params), strict=True):
        p.grad += h


@step
def meta_learning(model: nn.Module, batches: list[Any], sgd: Any) -> None:
    """Without recomputation, which would run with other parameters than the call was given."""
    model.recompute = False
    params = dict(model.named_parameters())
    loss = model(batches[0]).square().sum()
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    fast = {n: p - 0.01 * g for (n, p), g in zip(params.items(), grads, strict=True)}
    torch.func.functional_call(model, fast, (batches[1],)).square().sum().backward()


def made(options: dict[str, Any] | None, mesh: Any, dtype: torch.dtype) -> Critic:
    torch.manual_seed(0)
    model = Critic().to(dtype)
    if options is None:
        return model
    if not options:
        return dt.shard_module(model, mesh)
    options = {"segments": ["one", "two"], **options}
    replicas = "dp" if mesh.ndim == 2 else None
    return dt.shard_data_parallel(model, mesh, replicate_axis=replicas, **options)


def trained(
    name: str, options: dict[str, Any] | None, mesh: Any, *, rows: int, recompute: bool
) -> list[Any]:
    model = made(options, mesh, torch.float64)
    model.recompute = recompute
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    out: list[Any] = []
    for i in range(3):
        batches = [batch_of(None if options is None else mesh, 10 * i + j, rows) for j in range(3)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*will create a reference cycle")
            STEPS[name](model, batches, sgd)
        out += [p.grad if p.grad is None else values([p.grad])[0] for p in model.parameters()]
        sgd.step()
        sgd.zero_grad(set_to_none=i == 0)
        out += values(list(model.parameters()))
    return out


def check(name: str, mesh: Any, options: dict[str, Any], **case: Any) -> None:
    found = [trained(name, o, mesh, **case) for o in (options, None)]
    torch.testing.assert_close(
        *found, rtol=1e-9, atol=1e-10, msg=lambda m: f"{name} {mesh} {options} {case}: {m}"
    )


@pytest.mark.parametrize("name", STEPS)
@on_ranks(2, timeout=300)
def test_two_ranks_differentiate_as_one(name: str) -> None:
    for options in OPTIONS:
        for rows, recompute in part([(5, False), (1, True)], 1, f"{name} {options}"):
            check(name, meshes()["fsdp"], options, rows=rows, recompute=recompute)


@pytest.mark.parametrize("name", STEPS)
@on_ranks(4, timeout=300)
def test_replicas_differentiate_as_one(name: str) -> None:
    for options in part(OPTIONS, 2, name):
        check(name, meshes()["dp x fsdp"], options, rows=5, recompute=True)


@on_ranks(2)
def test_memory_is_freed_once_the_parameters_have_changed() -> None:
    model = made({"stage": 3, "segments": ["*"]}, meshes()["fsdp"], torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    STEPS["gradient_penalty"](model, [batch_of(meshes()["fsdp"], i) for i in range(3)], sgd)
    sgd.step()
    model(batch_of(meshes()["fsdp"], 0)).sum().backward()
    engine: Any = model.__dict__["_data_parallel"]
    assert engine.segments and not any(b.is_gathered for s in engine.segments for b in s.buffers)


@on_ranks(2)
def test_half_precision_and_accumulation() -> None:
    """Gradients of gathered copies in another dtype have the dtype of the parameter."""
    mesh = meshes()["fsdp"]
    for stage in (1, 2, 3):
        ours, plain = (
            made({"stage": stage, "param_dtype": torch.float32}, mesh, torch.float64),
            made(None, None, torch.float64),
        )
        for m in (ours, plain):
            for i in range(2):
                scope: Any = contextlib.nullcontext()
                if m is ours:
                    scope = dt.accumulate(
                        ours, last=i == 1, reduce="none" if stage == 2 else "scatter"
                    )
                with scope:
                    x = batch_of(mesh if m is ours else None, i).requires_grad_()
                    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
                    (g.square().sum() + m(x).sum()).backward()
            found = torch.autograd.grad(m(x).sum(), list(m.parameters()))
            assert all(g.dtype is torch.float64 for g in found)
            for p, g in zip(m.parameters(), found, strict=True):
                p.grad = p.grad + g
        grads = [values([p.grad for p in m.parameters()]) for m in (ours, plain)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
