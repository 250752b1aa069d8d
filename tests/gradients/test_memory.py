"""Gradients that are summed together keep their memory from step to step, and whoever holds one of
before sees no other value in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.gradients import memory as grad_memory
from disttensor.gradients.memory import GradBucket, GradMemory, grad_bucket_of
from tests.gradients.test_flat_sum import HOLDERS
from tests.support.pool import on_ranks

SHAPES = [torch.Size((2, 3)), torch.Size((0,)), torch.Size(())]
SIZES = [8, 0, 1]  # the first has a larger piece elsewhere
Script = Callable[[nn.Module, Any, Any], None]


def bucket() -> GradBucket:
    return GradBucket(SHAPES, SIZES, torch.zeros(1), torch.float32)


def test_tensors_lie_one_behind_another_each_with_its_own_storage() -> None:
    some = bucket()
    assert [t.shape for t in some.tensors] == SHAPES and len(some.flat) == 9
    for i, t in enumerate(some.tensors):
        t.fill_(i + 1)
    assert some.flat.tolist() == [1] * 6 + [0, 0, 3]
    assert [t.untyped_storage().nbytes() for t in some.tensors] == [24, 0, 4]


@pytest.mark.parametrize(
    "hold", [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.numpy()]
)
def test_who_holds_a_tensor_is_seen_and_keeps_its_memory(hold: Any) -> None:
    some = bucket()
    assert all(some.is_free(i) for i in range(3))
    held = hold(some.tensors[0])
    assert [some.is_free(i) for i in range(3)] == [False, True, True]
    some.release([0])
    some.flat.fill_(7)
    assert held.sum() == 0 and some.is_free(0) and some.copied == {0}


def settled(grad: torch.Tensor, keep: bool = False) -> tuple[GradBucket, torch.Tensor]:
    some, place = bucket(), GradMemory()
    leaf = torch.zeros(grad.shape, dtype=grad.dtype, requires_grad=True)
    place.bucket = some
    leaf.register_post_accumulate_grad_hook(place.adopt_grad)
    kept = some.tensors[0] if keep else None
    leaf.backward(grad)
    assert leaf.grad is not None and torch.equal(leaf.grad.to_dense(), grad.to_dense())
    assert kept is None or kept.sum() == 0
    return some, leaf


def test_a_gradient_settles_and_adds_up_there() -> None:
    some, leaf = settled(torch.ones(3, 2).t())
    assert leaf.grad is some.tensors[0] and leaf.grad.is_contiguous()
    leaf.backward(torch.ones(2, 3))
    assert leaf.grad is some.tensors[0] and some.flat.tolist() == [2] * 6 + [0] * 3


@pytest.mark.parametrize(
    ("grad", "keep"),
    [
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(1, 3), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.ones(2, 3), True),
    ],
    ids=["another dtype", "another shape", "sparse", "held"],
)
def test_a_gradient_that_does_not_fit_or_whose_place_is_held_stays(
    grad: torch.Tensor, keep: bool
) -> None:
    some, leaf = settled(grad, keep)
    assert leaf.grad is not some.tensors[0] and some.flat.sum() == 0


def test_a_gradient_with_a_graph_stays() -> None:
    some, place, x = bucket(), GradMemory(), torch.ones(2, 3, requires_grad=True)
    place.bucket = some
    x.register_post_accumulate_grad_hook(place.adopt_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle of references
        (x**3).sum().backward(create_graph=True)
    assert x.grad is not None and x.grad.requires_grad and some.flat.sum() == 0


def test_a_bucket_is_for_the_same_places_in_the_same_order() -> None:
    some = [GradMemory(), GradMemory()]
    args = SHAPES, SIZES, torch.zeros(1), torch.float32
    first = grad_bucket_of(some, *args)
    assert grad_bucket_of(some, *args) is first
    assert grad_bucket_of(some[:1], *args) is first  # what is behind them has no place of its own
    assert grad_bucket_of(some[::-1], *args) is not first
    assert grad_bucket_of(some, *args) is not first
    assert grad_bucket_of(some, *args[:3], torch.float64).dtype is torch.float64
    assert len(grad_bucket_of(some, SHAPES, [6, 0, 1], args[2], torch.float64).flat) == 7


# Whole steps ----------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def trained(how: str) -> nn.Module:
    net, mesh = model(), dt.init_mesh((2,), ("dp",))
    if how == "shard_module":
        return dt.shard_module(net, mesh, {})
    return dt.shard_data_parallel(net, mesh, shard_axis=None)


def rows(n: int = 5) -> torch.Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def value(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, dt.DistTensor) else x).detach()


def step(net: nn.Module, x: Any, opt: Any) -> None:
    opt.zero_grad()
    net(x).sum().backward()
    opt.step()


def twice(net: nn.Module, x: Any, opt: Any) -> None:
    """Two backwards of one graph, then another forward."""
    opt.zero_grad()
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    net(x).square().sum().backward()
    opt.step()


def zeros(net: nn.Module, x: Any, opt: Any) -> None:
    opt.zero_grad(set_to_none=False)
    net(x).sum().backward()
    opt.step()


def never(net: nn.Module, x: Any, opt: Any) -> None:
    """Gradients add up over steps."""
    net(x).sum().backward()
    opt.step()


def looked_at(net: nn.Module, x: Any, opt: Any) -> None:
    """``g`` is the last gradient until the next step comes to it."""
    opt.zero_grad()
    net(x).sum().backward()
    for p in net.parameters():
        g = net.g = p.grad
        assert g.shape == p.shape
    opt.step()


def clipped(net: nn.Module, x: Any, opt: Any) -> None:
    opt.zero_grad()
    net(x).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()


def halves(net: Any, x: Any, opt: Any) -> None:
    """Every other step lacks the gradients of the first layer."""
    opt.zero_grad()
    net.odd = not getattr(net, "odd", True)
    net[0].requires_grad_(not net.odd)
    net(x).sum().backward()
    opt.step()


def two_optimizers(net: Any, x: Any, opt: Any) -> None:
    for layer in (net[0], net[2]):
        one = torch.optim.SGD(layer.parameters(), lr=0.1)
        one.zero_grad()
        net(x).square().sum().backward()
        one.step()


def assigned(net: Any, x: Any, opt: Any) -> None:
    step(net, x, opt)
    net[0].weight.grad = net[0].weight.grad * 2
    opt.step()
    net(x).sum().backward()
    opt.step()


def held(net: Any, x: Any, opt: Any) -> None:
    """Who keeps the list of gradients sees them, as torch adds to them in place."""
    if not hasattr(net, "held"):
        net(x).sum().backward()
        net.held = [[p.grad for p in net.parameters()]]
    opt.zero_grad(set_to_none=False)
    net(x).sum().backward()
    (net[0].weight.square().sum() + net[2].bias.sum()).backward()
    opt.step()
    for p, g in zip(net.parameters(), net.held[0], strict=True):
        assert g is p.grad


SCRIPTS = [step, twice, zeros, never, looked_at, clipped, halves, two_optimizers, assigned, held]
ways = pytest.mark.parametrize("how", ["shard_module", "shard_data_parallel"])


@on_ranks(2)
@ways
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_steps_are_those_of_one_process(how: str, script: Script) -> None:
    plain, net = model(), trained(how)
    ours, theirs = sgd(net), sgd(plain)
    for n in (5, 4, 5, 3, 5):
        script(plain, rows(n), theirs)
        script(net, dt.shard_tensor(rows(n), dt.init_mesh((2,), ("dp",)), [dt.Shard(0)]), ours)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(value(p), value(q), rtol=0, atol=1e-12)
            assert (p.grad is None) is (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(value(p.grad), q.grad, rtol=0, atol=1e-12)


@on_ranks(2)
@ways
def test_gradients_lie_in_one_memory_that_stays(how: str) -> None:
    net, x = trained(how), dt.shard_tensor(rows(), dt.init_mesh((2,), ("dp",)), [dt.Shard(0)])
    opt, seen = sgd(net), []
    for _ in range(3):
        step(net, x, opt)
        seen.append([p.grad.to_local().data_ptr() for p in net.parameters()])
    assert seen[0] == seen[1] == seen[2]
    assert [b - a for a, b in zip(seen[0], seen[0][1:], strict=False)] == [96, 24, 24]
    opt.zero_grad()
    net(x).sum().backward()  # they come to lie there in the backward
    assert [p.grad.to_local().data_ptr() for p in net.parameters()] == seen[0]


@on_ranks(2)
@ways
@pytest.mark.parametrize("name", [*HOLDERS, "the gradient"])
def test_who_holds_a_gradient_of_an_earlier_step_keeps_it(how: str, name: str) -> None:
    """It is seen once: what he holds in later steps is memory of its own."""
    plain, net = model(), trained(how)
    ours, theirs, kept = sgd(net), sgd(plain), []
    keep, values = HOLDERS.get(name, (lambda g: g, lambda kept: kept.to_local()))
    with mock.patch.object(
        grad_memory.GradBucket, "release", autospec=True, side_effect=GradBucket.release
    ) as left:
        for _ in range(5):
            step(plain, rows(), theirs)
            mesh = dt.init_mesh((2,), ("dp",))
            step(net, dt.shard_tensor(rows(), mesh, [dt.Shard(0)]), ours)
            weight, like = net[0].weight, plain[0].weight.grad
            torch.testing.assert_close(weight.grad.to_local(), like, rtol=0, atol=1e-12)
            kept.append((keep(weight.grad), like.clone()))
    assert left.call_count == 1
    for held, like in kept:
        found = values(held).reshape(-1)
        torch.testing.assert_close(found, like.reshape(-1)[-len(found) :], rtol=0, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("name", HOLDERS)
def test_who_holds_a_gradient_before_the_step_does_not_see_its_sum(name: str) -> None:
    net, mesh = trained("shard_module"), dt.init_mesh((2,), ("dp",))
    opt, x = sgd(net), dt.shard_tensor(rows(), mesh, [dt.Shard(0)])
    step(net, x, opt)
    keep, values = HOLDERS[name]
    with mock.patch.object(
        grad_memory.GradBucket, "release", autospec=True, side_effect=GradBucket.release
    ) as left:
        for _ in range(3):
            opt.zero_grad()
            net(x).sum().backward()
            before = net[0].weight.grad.to_local().clone()
            kept = keep(net[0].weight.grad)
            opt.step()
            found = values(kept).reshape(-1)
            torch.testing.assert_close(found, before.reshape(-1)[-len(found) :], rtol=0, atol=0)
    assert left.call_count == 1
