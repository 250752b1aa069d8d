"""Several models, optimizers and groups of parameters; optimizer states that are kept in memory."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import disttensor as dt
from disttensor.comm.process_group import world
from tests.support.pool import run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


def net(seed: int, inputs: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 4))


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter):
        super().__init__()
        self.scale, self.inner = scale, net(1)

    def forward(self, x):
        return self.inner(x * self.scale)


AdamW = torch.optim.AdamW


def one_optimizer(accelerator: Any) -> Any:
    a, b = net(0), net(1, 4)
    groups = [{"params": [*b.parameters()], "lr": 0.05}, {"params": [*a.parameters()]}]
    a, b, optimizer = accelerator.prepare(a, b, AdamW(groups, lr=0.1))
    return lambda x: b(a(x)), [optimizer], (a, b)


def two_optimizers(accelerator: Any) -> Any:
    model = net(0)
    made = AdamW(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    *optimizers, model = accelerator.prepare(*made, model)  # the model comes last
    return model, optimizers, (model,)


def prepared_later(accelerator: Any) -> Any:
    model = net(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model = accelerator.prepare_model(model)
    return model, [accelerator.prepare(optimizer)], (model,)


def shared_parameter(accelerator: Any) -> Any:
    scale = nn.Parameter(torch.ones(6))
    a, b = Scaled(scale), Scaled(scale)
    params = dict.fromkeys([*a.parameters(), *b.parameters()])
    a, b, optimizer = accelerator.prepare(a, b, torch.optim.SGD(list(params), lr=0.1))
    assert a.scale is b.scale
    return lambda x: a(x) * b(x), [optimizer], (a, b)


def biases_only(accelerator: Any) -> Any:
    model = net(0)
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    groups = [{"params": []}, {"params": [p for p in model.parameters() if p.requires_grad]}]
    model, optimizer = accelerator.prepare(model, AdamW(groups, lr=0.1))
    return model, [optimizer], (model,)


CASES = (one_optimizer, two_optimizers, prepared_later, shared_parameter, biases_only)


def learned(degrees: dict[str, int] | None, folder: Path) -> list[Any]:
    from accelerate import Accelerator

    folder, out = folder / str(world()[0]), []
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=draws), torch.randn(8, 4, generator=draws)
    with dt.integrations.one_process() if degrees else contextlib.nullcontext():
        for number, case in enumerate(CASES):
            accelerator = Accelerator(cpu=True)
            if degrees:
                dt.integrations.shard_accelerator(accelerator, dt.Strategy(**degrees))
            call, optimizers, models = case(accelerator)

            def step(
                call: Any = call, optimizers: Any = optimizers, accelerator: Any = accelerator
            ) -> float:
                loss = F.mse_loss(call(x), y)
                accelerator.backward(loss)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                return loss.item()

            losses = [step()]
            kept = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
            losses.append(step())
            for optimizer, state in zip(optimizers, kept, strict=True):
                optimizer.load_state_dict(state)
            losses.append(step())
            if number in (0, 4):
                accelerator.save_state(str(folder / str(number)))
                losses.append(step())
                accelerator.load_state(str(folder.parent / "0" / str(number)))
                losses.append(step())
            out.append(
                (losses, [dt.broadcast_value(p).tolist() for m in models for p in m.parameters()])
            )
        if degrees:
            with pytest.raises(ValueError, match="in no model that this strategy has placed"):
                accelerator.prepare(AdamW(net(3).parameters()))
    return out


@pytest.mark.parametrize("axis", ["dp", "sharding"])
def test_models_and_optimizers_learn_what_they_do_in_one_process(axis: str, tmp_path: Path) -> None:
    [wanted] = run_on_ranks(1, learned, None, tmp_path / "one")
    for mine in run_on_ranks(2, learned, {axis: 2}, tmp_path):
        for case, (losses, values), (theirs, right) in zip(CASES, mine, wanted, strict=True):
            assert losses == pytest.approx(theirs, rel=1e-4), case.__name__
            for p, q in zip(values, right, strict=True):
                torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-4)
