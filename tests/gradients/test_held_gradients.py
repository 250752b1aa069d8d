"""A gradient that the program has read or set before, and still holds, shows what later backwards
add to it, as in one process, where autograd adds in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import line, place, randn
from tests.support.pool import on_ranks

Batch = Callable[[int], Tensor]
Pause = Callable[[nn.Module], AbstractContextManager[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.row = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))) * self.row


def sharded(way: str, model: nn.Module) -> nn.Module:
    if way == "whole":
        return dt.shard_module(model, line())
    if way == "split":
        plan = {name: [Shard(0)] for name, _ in model.named_parameters() if name != "row"}
        return dt.shard_module(model, line(), plan)
    options = (
        {"shard_axis": None} if way == "replicas" else {"stage": int(way[-1]), "shard_axis": "x"}
    )
    return dt.shard_data_parallel(model, line(), segments=["first", "second"], **options)


def grads(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def after_a_step(model: nn.Module, x: Batch, _: Pause) -> list[Any]:
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    x(0).square().sum().backward()
    sgd.step()
    held, norms = grads(model), []
    for i in range(2):
        torch._foreach_zero_(held)
        x(i).square().sum().backward()
        norms += torch._foreach_norm(held)
        torch._foreach_mul_(held, 0.5)
        sgd.step()
    return norms


def set_before(model: nn.Module, x: Batch, _: Pause) -> list[Any]:
    held = [torch.zeros_like(p) for p in model.parameters()]
    for p, g in zip(model.parameters(), held, strict=True):
        p.grad = g
    for i in range(2):
        for g in held:
            g.zero_()
        x(i).square().sum().backward()
        for g in held:
            g.mul_(0.5)
    return held


def after_clipping(model: nn.Module, x: Batch, _: Pause) -> list[Any]:
    x(0).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    held = grads(model)
    x(1).square().sum().backward()
    return held


def clipped_in_an_accumulation(model: nn.Module, x: Batch, pause: Pause) -> list[Any]:
    for i in range(2):
        with pause(model):
            x(i).square().sum().backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
    return grads(model)


def scaled_in_an_accumulation(model: nn.Module, x: Batch, pause: Pause) -> list[Any]:
    x(0).square().sum().backward()
    held = grads(model)
    with pause(model):
        x(1).square().sum().backward()
    for g in held:
        g.mul_(0.5)
    x(2).square().sum().backward()
    return held


def frozen_before_the_step(model: nn.Module, x: Batch, _: Pause) -> list[Any]:
    x(0).square().sum().backward()
    model.first.requires_grad_(False)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return grads(model)


SCRIPTS = (
    after_a_step, set_before, after_clipping, clipped_in_an_accumulation,
    scaled_in_an_accumulation, frozen_before_the_step,
)  # fmt: skip


@pytest.mark.parametrize("way", ["whole", "split", "replicas", "stage 1", "stage 3"])
@on_ranks(2)
def test_held_gradients_are_those_of_one_process(way: str) -> None:
    @contextmanager
    def pause(model: nn.Module) -> Iterator[None]:
        with dt.accumulate(model, False) if way not in ("whole", "split") else nullcontext():
            yield

    for script in SCRIPTS:
        results = []
        for model in (Net(), sharded(way, Net())):
            torch.manual_seed(0)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape))
            is_plain = not results
            split = [Replicate() if way == "split" else Shard(0)]

            def loss(i: int, model: Any = model, plain: Any = is_plain, to: Any = split) -> Tensor:
                x = randn(5, 5, seed=i).float()
                out: Tensor = model(x if plain else place(x, line(), to))
                return out

            out = script(model, loss, (lambda _: nullcontext()) if is_plain else pause)
            torch.optim.SGD(model.parameters(), 0.1).step()
            results.append([*out, *model.parameters()])
        plain, ours = results
        for a, b in zip(ours, plain, strict=True):
            whole = a.full_tensor() if isinstance(a, dt.DistTensor) else a
            torch.testing.assert_close(whole.detach(), b.detach(), rtol=1e-4, atol=1e-5)
