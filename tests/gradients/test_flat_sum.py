"""Large gradients are summed where they lie, unless somebody could see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import dlpack

import disttensor as dt
from disttensor.gradients import flat_sum
from disttensor.gradients.memory import grad_memory_of
from tests.support.pool import on_ranks

# How somebody holds the memory of a gradient, and the values that this one has.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the piece": (lambda g: g.to_local(), lambda kept: kept),
    "a view of it": (lambda g: g.to_local()[1:], lambda kept: kept),
    "a numpy array": (lambda g: g.to_local().numpy(), torch.from_numpy),
    "another library": (lambda g: dlpack.to_dlpack(g.to_local()), dlpack.from_dlpack),
    "its storage": (
        lambda g: g.to_local().untyped_storage(),
        lambda kept: torch.tensor([], dtype=torch.float64).set_(kept),
    ),
    "a list": (lambda g: [g.to_local()], lambda kept: kept[0]),
}


def trained(layers: str) -> tuple[nn.Module, Any]:
    """A model and the inputs of 5 rows, of which two ranks have 3 and 2."""
    torch.manual_seed(0)
    mesh = dt.init_mesh((2,), ("dp",))
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    if layers == "shard_module":
        dt.shard_module(net, mesh, {})
    else:
        dt.shard_data_parallel(net, mesh, shard_axis=None)
    x = torch.randn(5, 4, dtype=torch.float64)
    return net, dt.shard_tensor(x, mesh, [dt.Shard(0)])


def expected() -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    net(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    return [p.grad for p in net.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("who", ["shard_module", "shard_data_parallel"])
def test_gradients_are_those_of_one_process(who, large):
    net, x = trained(who)
    with (
        mock.patch.object(flat_sum, "LARGE", 1 if large else 2**40),
        dt.debugging.record_comms() as log,
    ):
        net(x).sum().backward()
        dt.sync_gradients(net)
    for p, whole in zip(net.parameters(), expected(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), whole, rtol=0, atol=1e-12)
    counts = who == "shard_data_parallel"  # on how many ranks there is a gradient
    assert len([c for c in log if c.kind == "all_reduce"]) == (4 + counts if large else 1), log


@on_ranks(2)
@pytest.mark.parametrize("name", [None, *HOLDERS])
def test_who_holds_a_gradient_does_not_see_its_sum(name):
    """Without anybody, the sum is where the gradient was."""
    net, x = trained("shard_module")
    net(x).sum().backward()
    weight = net[0].weight
    at = weight.grad.to_local().data_ptr()
    before = weight.grad.to_local().clone()
    keep, values = HOLDERS[name] if name else (lambda g: None, None)
    kept = keep(weight.grad)
    with mock.patch.object(flat_sum, "LARGE", 1):
        dt.sync_gradients(net)
    torch.testing.assert_close(weight.grad.to_local(), expected()[0], rtol=0, atol=1e-12)
    assert (weight.grad.to_local().data_ptr() == at) is (name is None)
    if name:
        found = values(kept).reshape(-1)
        torch.testing.assert_close(found, before.reshape(-1)[-len(found) :], rtol=0, atol=0)


@pytest.mark.parametrize("who", ["shard_module", "shard_data_parallel"])
@on_ranks(2)
def test_a_gradient_that_nobody_holds_keeps_its_place(who):
    net, x = trained(who)
    for _ in range(3):
        net.zero_grad()
        net(x).sum().backward()
        dt.sync_gradients(net)
    places = [grad_memory_of(p) for p in net.parameters()]
    assert all(place.bucket is places[0].bucket and not place.bucket.copied for place in places)


@on_ranks(2)
def test_a_gradient_that_is_shown_while_it_waits_is_not_written_to():
    """Under ``accumulate``, the sum so far is what ``p.grad`` has given."""
    net, x = trained("shard_data_parallel")
    with mock.patch.object(flat_sum, "LARGE", 1):
        with dt.accumulate(net, last=False, reduce="none"):
            net(x).sum().backward()
        kept = net[0].weight.grad.to_local()
        before = kept.clone()
        with dt.accumulate(net, last=True, reduce="none"):
            (net(x) * 0).sum().backward()
    torch.testing.assert_close(net[0].weight.grad.to_local(), expected()[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


def test_pieces_in_new_memory_are_padded_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was used before may hold NaN, which checks of collectives would report."""
    sent: list[list[float]] = []

    def all_reduce(flat: torch.Tensor, *_: Any, **how: Any) -> None:
        sent.append(flat.tolist())

    def empty(numel: int, **how: Any) -> torch.Tensor:
        return torch.full((numel,), float("nan"), **how)

    monkeypatch.setattr(flat_sum.collectives, "all_reduce", all_reduce)
    monkeypatch.setattr(torch, "empty", empty)
    group: Any = None
    pieces = [torch.ones(2), torch.ones(1, 2)]
    flat_sum._sum_in_new_memory(pieces, [0, 1], [3, 2], group, torch.float32)
    assert sent == [[1, 1, 0, 1, 1]] and [p.shape for p in pieces] == [(2,), (1, 2)]
