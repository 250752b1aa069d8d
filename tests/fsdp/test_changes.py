"""What a user changes between a forward and its backward, or between two steps: the values,
gradients and errors of one process, under replicas and each stage of sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.pool import on_ranks
from tests.support.training import full

S0 = dt.Shard(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.register_buffer("shift", torch.ones(2))
        self.double()

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x))) + self.shift


Change = Callable[[Any, list[Any]], Any]


def freeze(net: Any, seen: list[Any]) -> None:
    net.first.weight.requires_grad_(False)


def unfreeze(net: Any, seen: list[Any]) -> None:
    net.first.weight.requires_grad_(True)


def write(net: Any, seen: list[Any]) -> None:
    with torch.no_grad():
        net.second.weight.mul_(3)


def write_data(net: Any, seen: list[Any]) -> None:
    net.second.weight.data.mul_(3)


def new_data(net: Any, seen: list[Any]) -> None:
    net.second.weight.data = net.second.weight.data * 3


def write_buffer(net: Any, seen: list[Any]) -> None:
    net.shift.mul_(4)


def step(net: Any, seen: list[Any]) -> None:
    for p in net.parameters():
        if p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)
    torch.optim.SGD(net.parameters(), 0.5, weight_decay=0.3).step()


def load(net: Any, seen: list[Any]) -> None:
    net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})


def load_plain(net: Any, seen: list[Any]) -> None:
    net.load_state_dict({k: v * 2 for k, v in Net().state_dict().items()})


def module_hook(net: Any, seen: list[Any]) -> None:
    net.second.register_forward_hook(lambda m, given, got: got * 2)
    net.first.register_forward_pre_hook(lambda m, given: (given[0] + 1,))


def backward_hook(net: Any, seen: list[Any]) -> None:
    net.second.register_full_backward_hook(lambda m, given, got: (given[0] * 3,))


def post_hook(net: Any, seen: list[Any]) -> None:
    net.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad) * 1))


def zero(net: Any, seen: list[Any]) -> None:
    net.zero_grad(set_to_none=False)


def no_gradients(net: Any, seen: list[Any]) -> None:
    net.zero_grad()


def own_gradient(net: Any, seen: list[Any]) -> None:
    net.first.bias.grad = torch.ones_like(net.first.bias)


def scale_gradients(net: Any, seen: list[Any]) -> None:
    for p in net.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def read(net: Any, seen: list[Any]) -> None:
    seen.extend(full(v) for v in copy.copy(net.state_dict()).values())
    seen.extend(full(p.grad) for p in net.parameters() if p.grad is not None)


def clip(net: Any, seen: list[Any]) -> None:
    seen.append(full(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)))


def evaluate(net: Any, seen: list[Any]) -> None:
    with torch.no_grad():
        seen.append(full(net(batch(net, 7))))


def other_backward(net: Any, seen: list[Any]) -> None:
    net(batch(net, 5)).sum().backward()


CHANGES: dict[str, Change] = {
    f.__name__: f
    for f in (
        freeze, unfreeze, write, write_data, new_data, write_buffer, step, load, load_plain,
        module_hook, backward_hook, post_hook, zero, no_gradients, own_gradient, scale_gradients,
        read, clip, evaluate, other_backward,
    )
}  # fmt: skip


def batch(net: Any, seed: int) -> Any:
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = net.first.weight
    return dt.shard_tensor(x, p.process_mesh, [S0]) if isinstance(p, dt.DistTensor) else x


def outcome(net: Any, where: str, change: Change) -> tuple[list[Any], str]:
    """The losses, what was seen, gradients and parameters; the text of an error ends them."""
    seen: list[Any] = []
    try:
        if where == "before":
            change(net, seen)
        for number in range(3):
            loss = net(batch(net, number)).square().sum()
            seen.append(full(loss.detach()))
            if where == "between" and number == 1:
                change(net, seen)
            loss.backward()
            if where == "after" and number == 1:
                change(net, seen)
        seen.extend(full(p.grad) if p.grad is not None else None for p in net.parameters())
        seen.extend(full(p.detach()) for p in net.parameters())
    except (RuntimeError, ValueError) as error:
        return seen, str(error)
    return seen, ""


def line() -> Any:
    return dt.init_mesh((2,), ("fsdp",))


WAYS: dict[str, Callable[[Any], Any]] = {
    "replicate": lambda net: dt.replicate(net, mesh=line()),
    "stage 1": lambda net: dt.shard_data_parallel(net, line(), stage=1),
    "stage 2": lambda net: dt.shard_data_parallel(net, line(), stage=2),
    "stage 3": lambda net: dt.shard_data_parallel(net, line(), stage=3),
    "fully_shard": lambda net: dt.fully_shard(net, mesh=line()),
    "shard_module": lambda net: dt.shard_module(net, line(), {"first.*": [S0]}),
}


SHARDED = {"stage 1", "stage 2", "stage 3", "fully_shard"}
UNTRACKED = {
    ("write_data", "between"),
    ("new_data", "between"),
}  # writes that autograd does not see


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_changes_are_those_of_one_process(way: str) -> None:
    wrong = []
    for name, change in CHANGES.items():
        for where in ("before", "between", "after"):
            (want, error), net = outcome(Net(), where, change), Net()
            WAYS[way](net)
            got, own_error = outcome(net, where, change)
            if way in SHARDED and (name, where) in UNTRACKED:  # torch takes the new values
                assert "modified by an inplace operation" in own_error, own_error
                continue
            try:
                assert bool(error) == bool(own_error), (error, own_error)
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            except AssertionError as difference:
                wrong.append(f"{name} {where}: {difference}")
    assert not wrong, "\n\n".join(wrong)
