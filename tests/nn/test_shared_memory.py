"""Tensors of one memory in a module that is placed: refused by name, or a warning. A state dict of
regular tensors that is assigned: parameters stay sharded."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.nn.test_user_facts import SHARDED, WAYS, Net, backward, line
from tests.support.pool import on_ranks
from tests.support.training import full, gradients
from tests.zoo import check


def one_memory(net: Any) -> None:
    net.second.bias = nn.Parameter(torch.ones(5, dtype=torch.float64))
    net.second.bias.data = net.first.bias.data


def part_of_a_parameter(net: Any) -> None:
    net.second.bias = nn.Parameter(net.first.weight.detach()[1])


def buffer_of_a_parameter(net: Any) -> None:
    net.second.register_buffer("rows", net.first.weight.detach()[1:3])


def buffer_of_a_buffer(net: Any) -> None:
    net.second.register_buffer("head", net.second.shift[:1])


def kept_view(net: Any) -> None:
    net.transposed = net.first.weight.t()


def kept_in_a_list(net: Any) -> None:
    net.second.views = [{"rows": net.first.weight.data[:2]}]


REFUSED: list[Callable[[Any], None]] = [one_memory, part_of_a_parameter, buffer_of_a_parameter]
WARNED: list[Callable[[Any], None]] = [buffer_of_a_buffer, kept_view, kept_in_a_list]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_two_tensors_of_one_memory_do_not_come_apart_without_a_word(way: str) -> None:
    for change in REFUSED:
        net = Net()
        change(net)
        with pytest.raises(ValueError, match="two tensors of one memory"):
            WAYS[way](net)
        assert all(type(p) is nn.Parameter for p in net.parameters())
    for change in WARNED:
        for _ in range(2):  # each time
            net = Net()
            change(net)
            with pytest.warns(UserWarning, match="two tensors of one memory"):
                WAYS[way](net)


class Slices(nn.Module):
    """Its tensors lie in one memory without an element in common."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(24.0).view(4, 6)
        self.left, self.right = nn.Parameter(flat[:2, :3]), nn.Parameter(flat[:2, 3:])
        self.rows = nn.Parameter(flat[2])
        self.register_buffer("last", flat[3])
        self.register_buffer("none", flat[:0])


@pytest.mark.parametrize("way", ["shard_module", "replicate", "stage 3"])
@on_ranks(2)
def test_parts_of_one_memory_that_do_not_overlap_are_placed(way: str) -> None:
    net = Slices()
    ways = {**WAYS, "shard_module": lambda net: dt.shard_module(net, line())}
    ways[way](net)
    assert full(net.right).tolist() == [[3, 4, 5], [9, 10, 11]]


class Hidden(nn.Module):
    """Keeps its layers in a list, and registers their parameters, as nbeats-pytorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 6), nn.Linear(6, 3)]
        self.kept = nn.ParameterList([p for layer in self.layers for p in layer.parameters()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("axis", ["dp", "tp", "stage 3"])
@on_ranks(2)
def test_modules_in_a_list_get_the_parameters_in_the_place_of_their_own(axis: str) -> None:
    torch.manual_seed(0)
    model = Hidden().double()
    plain, batch = copy.deepcopy(model), {"x": torch.randn(5, 4, dtype=torch.float64)}
    wanted = check.run(plain, batch)
    mine, _ = check.place(model, batch, axis)
    check.compare(model, check.run(model, mine), plain, wanted, 1e-5)


@on_ranks(2)
def test_placed_tensors_of_one_memory_are_refused_too() -> None:
    net = Net()
    dt.shard_module(net, line())
    net.second.bias = nn.Parameter(dt.ones(5, mesh=line(), dtype=torch.float64))
    net.second.bias.data = net.first.bias.data
    with pytest.raises(ValueError, match="two tensors of one memory"):
        SHARDED["stage 3"](net)


# load_state_dict(assign=True) ---------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "split"])
@on_ranks(2)
def test_assigned_values_stay_sharded(way: str) -> None:
    plain, net = Net(), Net()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    WAYS[way](net)
    before = dict(net.named_parameters())
    is_fixed = way != "shard_module"
    net.load_state_dict(plain.state_dict(), assign=True)
    for name, p in net.named_parameters():
        assert isinstance(p, dt.DistTensor) and p.placements == before[name].placements
        assert p.requires_grad and (p is before[name] or not is_fixed)
    assert isinstance(net.second.shift, dt.DistTensor)
    backward(net)
    backward(plain)
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-5, atol=1e-5)
    other = {name: value.float() for name, value in plain.state_dict().items()}
    if is_fixed:
        with pytest.raises(RuntimeError, match="the dtype stays"):
            net.load_state_dict(other, assign=True)
    else:
        net.load_state_dict(other, assign=True)
        assert {p.dtype for p in net.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({**plain.state_dict(), "first.bias": torch.ones(3)}, assign=True)


class Holder:
    def __init__(self, *tensors: Any) -> None:
        self.tensors = tensors


HELD: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda *x: x, lambda held: held),
    "named tuple": (lambda *x: torch.return_types.aminmax(x), lambda held: held),
    "dict of lists": (lambda *x: OrderedDict(a=[*x]), lambda held: held["a"]),
    "defaultdict": (lambda *x: defaultdict(list, a=x), lambda held: held["a"]),
    "UserDict": (lambda *x: UserDict(a=x), lambda held: held["a"]),
    "deque": (lambda *x: deque(x), lambda held: held),
    "object": (Holder, lambda held: held.tensors),
    "objects in a tuple": (lambda *x: ([Holder(*x)],), lambda held: held[0][0].tensors),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_tensors_in_attributes_are_those_that_were_placed(way: str) -> None:
    for name, (hold, tensors) in HELD.items():
        net = Net()
        net.second.held = hold(net.first.bias, net.second.shift)
        WAYS[way](net)
        bias, shift = tensors(net.second.held)
        assert bias is net.first.bias, name
        assert shift is net.second.shift, name


class Named(nn.Linear):
    """Loads as kernels of gpytorch do."""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *names):
        keys = ("missing_keys", "unexpected_keys", "error_msgs")
        super()._load_from_state_dict(
            state_dict=state_dict, prefix=prefix, local_metadata=local_metadata, strict=strict,
            **dict(zip(keys, names, strict=True)),
        )  # fmt: skip


def test_a_module_may_load_its_tensors_by_the_names_of_torch() -> None:
    net, plain = Named(3, 2), nn.Linear(3, 2)
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net.weight, plain.weight)
