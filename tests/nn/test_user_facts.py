"""What a user put on a parameter or buffer before it is placed, and puts on it later: attributes,
hooks, gradients, classes. Each way to place a module keeps it, or refuses it by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard, pipeline
from disttensor.errors import MismatchError
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import full

R, S0 = Replicate(), Shard(0)
Way = Callable[[nn.Module], Any]


def line() -> Any:
    return dt.init_mesh((2,), ("fsdp",))


def stage(number: int) -> Way:
    return lambda net: dt.shard_data_parallel(net, line(), stage=number)


def split_twice(net: nn.Module) -> None:
    dt.shard_module(net, line(), {"first.*": [R]})
    dt.shard_data_parallel(net, line(), stage=3)


def on_stages(net: nn.Module) -> None:
    stages = [dt.ProcessMesh([0], ("a",)), dt.ProcessMesh([1], ("a",))]
    pipeline.split([net.first, net.second], stages, of=net)


REPLICATED: dict[str, Way] = {
    "shard_module": lambda net: dt.shard_module(net, line(), {"first.*": [S0]}),
    "replicate": lambda net: dt.replicate(net, mesh=line()),
    "strategy": lambda net: dt.Strategy(dp=2).apply(net),
    "split": on_stages,
}
SHARDED: dict[str, Way] = {
    "stage 1": stage(1),
    "stage 2": stage(2),
    "stage 3": stage(3),
    "fully_shard": lambda net: dt.fully_shard(net, mesh=line()),
    "cast": lambda net: dt.shard_data_parallel(
        net, line(), shard_axis=None, param_dtype=torch.float32
    ),
    "twice": split_twice,
    "sharding": lambda net: dt.Strategy(sharding=2).apply(net),
}
WAYS = {**REPLICATED, **SHARDED}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.second.register_buffer("shift", torch.ones(2))
        self.double()

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return self.second(y) + self.second.shift


def data(net: nn.Module) -> Any:
    x = randn(4, 3)
    p = net.first.weight
    if not isinstance(p, dt.DistTensor):
        return x
    mesh = p.process_mesh
    return dt.shard_tensor(x, mesh, [R] * mesh.ndim)


def backward(net: nn.Module) -> None:
    net(data(net)).square().sum().backward()


def is_here(p: Any) -> bool:
    """False on a rank outside the mesh of the parameter."""
    return getattr(p, "is_initialized", True)


def check(net: nn.Module, got: list[list[Any]]) -> None:
    """Compares values of parameters in one process with those here."""
    here = [is_here(p) for p in net.parameters()]
    want, own = [[x for x, h in zip(some, here, strict=True) if h] for some in got]
    torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-5)


def gradients(net: nn.Module) -> list[Any]:
    return [full(p.grad) for p in net.parameters()]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_attributes_are_kept_and_seen_in_the_forward(way: str) -> None:
    net = Net()
    net.first.bias._no_weight_decay = net.second.shift.kind = "a"
    WAYS[way](net)
    assert net.first.bias._no_weight_decay == net.second.shift.kind == "a"
    net.first.bias.later = "b"
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        seen.append((module.bias._no_weight_decay, getattr(module.bias, "later", None)))
        module.weight.set_inside = "c"

    net.first.register_forward_pre_hook(look)
    backward(net)
    assert set(seen) == {("a", "b")} and net.first.weight.set_inside == "c"
    del net.first.bias.later
    backward(net)
    assert set(seen) == {("a", "b"), ("a", None)} and not hasattr(net.first.bias, "later")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_hooks_after_accumulation_are_kept_and_removed_by_their_handle(way: str) -> None:
    got: list[Any] = []
    for place in (None, WAYS[way]):
        net = Net()

        def double(p: Any) -> None:
            p.grad = p.grad * 2

        handles = [p.register_post_accumulate_grad_hook(double) for p in net.parameters()]
        if place is not None:
            place(net)
        backward(net)
        first = gradients(net)
        handles[0].remove()
        net.zero_grad()
        backward(net)
        got.append([[*pair] for pair in zip(first, gradients(net), strict=True)])
    check(net, got)


@pytest.mark.parametrize("way", REPLICATED)
@on_ranks(2)
def test_hooks_that_freeze_and_earlier_gradients_are_kept(way: str) -> None:
    got: list[Any] = []
    for place in (None, WAYS[way]):
        net = Net()
        handle = net.first.weight.register_hook(lambda g: g * 0)
        frozen = net.second.weight
        frozen.register_hook(lambda g: -g)
        frozen.requires_grad_(False)
        if way in ("shard_module", "split"):
            net.first.bias.grad = torch.arange(5.0, dtype=torch.float64)
        if place is not None:
            place(net)
        net.second.weight.requires_grad_(True)
        backward(net)
        handle.remove()
        backward(net)
        got.append(gradients(net))
    check(net, got)


@pytest.mark.parametrize("way", SHARDED)
@on_ranks(2)
def test_hooks_that_cannot_be_called_are_refused_before_any_change(way: str) -> None:
    net = Net()
    net.first.weight.register_hook(lambda g: g * 0)
    with pytest.raises(ValueError, match=r"'first.weight' has a hook"):
        WAYS[way](net)
    if way != "twice":  # there the first placement stays
        assert type(net.first.weight) is nn.Parameter


def cast_on_stages(net: nn.Module) -> None:
    strategy = dt.Strategy(pp=2, param_dtype=torch.float32)
    strategy.apply(net, layers=["first", "second"])


@pytest.mark.parametrize("way", ["shard_module", "replicate", "stage 3", "sharding", "cast stages"])
@on_ranks(2)
def test_hooks_of_one_rank_are_an_error_of_all_and_change_nothing(way: str) -> None:
    place = {**WAYS, "cast stages": cast_on_stages}[way]
    one, other = "register_hook", "register_post_accumulate_grad_hook"
    for kinds in ((None, one), (None, other), (one, other)):
        net = Net()
        kind = kinds[torch.distributed.get_rank()]
        if kind is not None:
            getattr(net.first.weight, kind)(lambda x: None)
        with pytest.raises(MismatchError, match="hooks differs between the ranks"):
            place(net)
        assert type(net.first.weight) is nn.Parameter
    net = Net()
    with dt.debugging.record_comms() as log:
        place(net)
    assert [c.kind for c in log].count("all_gather") == 1, log  # the ranks compare hooks once
    if way != "cast stages":
        backward(net)


class Scaled(nn.Parameter):
    """A class of the user without operators of its own."""


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_classes_of_the_user_are_refused_by_name(way: str) -> None:
    net = Net()
    net.first.bias = Scaled(torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'first.bias' is a Scaled, a class of yours"):
        WAYS[way](net)
    net = Net()
    net.second.shift = torch.ones(2, dtype=torch.float64).as_subclass(Marked)
    with pytest.raises(ValueError, match=r"'second.shift' is a Marked, a class of yours"):
        WAYS[way](net)


@on_ranks(2)
def test_gradients_keep_their_dtype() -> None:
    net = Net().float()
    net.first.weight.grad_dtype = torch.float64
    dt.shard_module(net, line())
    assert net.first.weight.grad_dtype is torch.float64


# References from before --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_each_backward_to_an_old_parameter_warns(way: str) -> None:
    net = Net()
    old = list(net.parameters())
    WAYS[way](net)
    with torch.no_grad():  # an evaluation, which once removed the warning
        sum(p.square().sum() for p in old)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sum(p.square().sum() for p in old).backward()
        texts = {str(w.message) for w in caught}
        for name, _ in net.named_parameters():
            assert any(repr(name) in text for text in texts), (name, texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(net)


class Listed(nn.Module):
    """Holds its parameters in plain containers too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("start", torch.arange(3.0))
        self.__dict__["origin"] = self.start
        self.every = [self.one, {"two": self.two}]

    def forward(self, x: Any) -> Any:
        return x * self.every[0] + self.every[1]["two"] + self.origin


@pytest.mark.parametrize("way", ["shard_module", "replicate", "stage 3"])
@on_ranks(2)
def test_parameters_in_lists_of_the_module_stay_tied(way: str) -> None:
    plain, net = Listed(), Listed()
    ways: dict[str, Way] = {**WAYS, "shard_module": lambda net: dt.shard_module(net, line())}
    ways[way](net)
    assert net.every[0] is net.one and net.every[1]["two"] is net.two and net.origin is net.start
    x = torch.tensor([1.0, 2.0, 3.0])
    plain(x).square().sum().backward()
    net(dt.shard_tensor(x, line(), [R])).square().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)
