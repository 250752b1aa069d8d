"""Gradients that have crossed between meshes are differentiated again, as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import pipeline
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes


def layers(on: Stages, stages: int):
    """(x, a function of x over all stages, its weights); there is a skip connection."""
    x = on.value(randn(5, 6), 0, requires_grad=True)
    weights = [on.leaf(randn(6, 6, seed=s + 1) / 3, s) for s in range(stages)]

    def forward(h):
        first = h
        for s, w in enumerate(weights):
            h = torch.tanh(F.linear(on.to(h, s), w))
        return h + on.to(first, stages - 1)

    return x, forward, weights


def of_input(on: Stages, stages: int):
    """The gradient penalty: the loss is on the last stage, the penalty on the first."""
    x, forward, _ = layers(on, stages)
    loss = forward(x).square().sum()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = (g.square().sum(1).sqrt() - 1).square().mean()
    return loss + on.to(penalty, stages - 1)


def penalty_alone(on: Stages, stages: int):
    x, forward, _ = layers(on, stages)
    (g,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
    return g.square().sum()


def of_weights(on: Stages, stages: int):
    """What each stage has of it comes to the last one."""
    x, forward, weights = layers(on, stages)
    grads = torch.autograd.grad(forward(x).square().sum(), weights, create_graph=True)
    return sum(on.to(g.square().sum(), stages - 1) for g in reversed(grads))


def of_the_last_weight(on: Stages, stages: int):
    """A gradient that has not crossed itself."""
    x, forward, weights = layers(on, stages)
    (g,) = torch.autograd.grad(forward(x).square().sum(), weights[-1], create_graph=True)
    return g.square().sum()


def three_times(on: Stages, stages: int):
    x, forward, _ = layers(on, stages)
    (g,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    return on.to((h * g).sum(), stages - 1)


PROGRAMS = [of_input, penalty_alone, of_weights, of_the_last_weight, three_times]


@pytest.mark.feature("Stages")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_two_stages(program, seed):
    check_stages(lambda on: program(on, 2), stage_meshes(), seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(4)
def test_more_stages(program, kind, seed):
    meshes = stage_meshes(kind)
    check_stages(lambda on: program(on, len(meshes)), meshes, seed)


@on_ranks(2)
def test_what_does_not_depend_on_it_gets_zeros_or_nothing():
    """One process has no gradient there: on another mesh than the result's it may be zeros."""
    a, b = stage_meshes()
    x, w = (dt.shard_tensor(randn(3, seed=i), a, requires_grad=True) for i in range(2))
    v = dt.shard_tensor(randn(3, seed=2), b, requires_grad=True)
    (g,) = torch.autograd.grad((dt.reshard(x * w, b) * v).sum(), v, create_graph=True)
    assert g.requires_grad and g.process_mesh is b
    g.sum().backward()
    for t, expected in ((x, randn(3, seed=1)), (w, randn(3)), (v, torch.zeros(3).double())):
        if t.is_initialized:
            torch.testing.assert_close(expected, expected if t.grad is None else t.grad.to_local())
    (g,) = torch.autograd.grad((dt.reshard(x.square(), b) * v).sum(), x, create_graph=True)
    assert g.requires_grad and g.process_mesh is a


@on_ranks(4)
def test_all_ranks_know_the_layout_of_a_gradient():
    """It is not pending, though uses of x vary, which ranks outside do not see."""
    a, b = stage_meshes()
    x = dt.shard_tensor(randn(3), a, requires_grad=True)
    batch = dt.shard_tensor(randn(5, 3, seed=1), a, [dt.Shard(0)])
    loss = dt.reshard((batch * x).square().sum(), b)
    (g,) = torch.autograd.grad(loss, x)
    assert g.placements == (dt.Replicate(),)
    expected = 2 * randn(5, 3, seed=1).square().sum(0) * randn(3)
    torch.testing.assert_close(g.full_tensor(everywhere=True), expected)


@on_ranks(2)
def test_in_a_schedule_it_is_an_error():
    a, b = stage_meshes()
    x = dt.shard_tensor(randn(3), a, requires_grad=True)

    def step(_):
        h = dt.reshard(torch.tanh(x), b)
        loss = h.square().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + dt.reshard(g.square().sum(), b)

    with pytest.raises(NotImplementedError, match="before it has returned"):
        pipeline.run(step, [1, 2], "1f1b")

    def within(_):
        h = torch.tanh(x)
        (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return dt.reshard(g, b).square().sum()

    pipeline.run(within, [1, 2], "1f1b")
    y = randn(3).requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(y).square().sum(), y, create_graph=True)
    (2 * g.square().sum()).backward()
    if x.is_initialized:
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)
