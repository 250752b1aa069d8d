"""shard_data_parallel in training loops that are not one forward, one backward and one step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import DistTensor
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import (
    EACH,
    S0,
    STAGES,
    at_rest,
    check,
    compare,
    full,
    gradients,
    line,
    mlp,
    sgd,
    squares,
    stages,
    values,
    ways,
)

cuts = pytest.mark.parametrize("segments", [EACH, dt.fsdp.SegmentBySize()], ids=["each", "one"])


# Several forwards and backwards in one step -------------------------------------------------------


def two_losses(model, x):
    y = model(x)
    first, second = y.square().sum(), y.sin().sum()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def two_forwards_one_backward(model, x):
    loss = model(x).square().sum() + (model(x * 2) * 3).sum()
    loss.backward()
    return loss


def two_forwards_two_backwards(model, x):
    first, second = model(x).square().sum(), model(x * 2).sum()
    second.backward()
    first.backward()
    return first + second


def three_backwards(model, x):
    total = 0
    for scale in (1, 2, 3):
        loss = model(x * scale).square().sum()
        loss.backward()
        total = total + loss.detach()
    return total


def forward_unused(model, x):
    model(x * 5)
    loss = model(x).square().sum()
    loss.backward()
    return loss


def evaluated_between(model, x):
    y = model(x)
    with torch.no_grad():
        other = model(x * 3)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    loss = (y - other).square().sum()
    loss.backward()
    return loss


def graph_thrown_away(model, x):
    y = model(x)
    del y
    loss = model(x).square().sum()
    loss.backward()
    return loss


def inference_between(model, x):
    y = model(x)
    with torch.inference_mode():
        model(x + 0)
    loss = y.square().sum()
    loss.backward()
    return loss


def partly(model, x):
    """One child after the other, never the root."""
    for child in model:
        x = child(x)
    loss = x.square().sum()
    loss.backward()
    return loss


def through_inputs(model, x):
    loss = model(x).square().sum()
    params = list(model.parameters())
    loss.backward(inputs=params)
    return loss


def of_the_input(model, x):
    x = x.detach().requires_grad_()
    y = model(x).square().sum()
    y.backward()
    return y + full_sum(x.grad)


def full_sum(g):
    return g.square().sum()


STEPS = [
    two_losses,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    three_backwards,
    forward_unused,
    evaluated_between,
    graph_thrown_away,
    inference_between,
    partly,
    through_inputs,
    of_the_input,
]


@stages
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
@cuts
@on_ranks(2)
def test_steps(step, stage, segments):
    check(mlp, step, mesh=line(), segments=segments, **ways(stage))


@stages
@pytest.mark.parametrize("zero", [True, False, None])
@on_ranks(2)
def test_gradients_add_up(stage, zero):
    check(mlp, three_backwards, mesh=line(), segments=EACH, zero=zero, **ways(stage))


# Something is written to a parameter --------------------------------------------------------------


@stages
@on_ranks(2)
def test_a_step_between_forward_and_backward_is_an_error(stage):
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    opt = sgd(model.parameters())
    x = dt.shard_tensor(randn(5, 6), line(), [S0])
    model(x).sum().backward()
    late = model(x).square().sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    opt.zero_grad()
    model(x).sum().backward()
    want = mlp()
    with torch.no_grad():
        for p, q in zip(want.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
    want(randn(5, 6)).sum().backward()
    compare(gradients(model), gradients(want))


def by_data(p):
    p.data.mul_(0.5)


def by_new_data(p):
    p.data = p.data * 0.5


def by_copy(p):
    with torch.no_grad():
        p.copy_(p * 0.5)


def by_detach(p):
    p.detach().mul_(0.5)


def by_init(p):
    nn.init.constant_(p, 0.25)


def by_data_of_detach(p):
    p.detach().data.mul_(0.5)


def by_row(p):
    """Of which only one rank has something."""
    with torch.no_grad():
        p[0] = 0.5


@stages
@on_ranks(2)
def test_what_is_written_to_a_parameter_counts(stage):
    for write in (by_data, by_new_data, by_copy, by_detach, by_init, by_data_of_detach, by_row):

        def step(model, x, write=write):
            for p in model.parameters():
                write(p)
            loss = model(x).square().sum()
            loss.backward()
            return loss

        check(mlp, step, mesh=line(), segments=EACH, **ways(stage))


@stages
@on_ranks(2)
def test_a_state_dict_is_loaded(stage):
    torch.manual_seed(1)
    other = mlp().state_dict()

    def step(model, x):
        here = model.state_dict()
        if isinstance(here["0.weight"], DistTensor):
            mesh = here["0.weight"].process_mesh
            model.load_state_dict(
                {k: dt.shard_tensor(v, mesh, here[k].placements) for k, v in other.items()}
            )
        else:
            model.load_state_dict(other)
        loss = model(x).square().sum()
        loss.backward()
        return loss

    check(mlp, step, mesh=line(), segments=EACH, **ways(stage))


@stages
@cuts
@on_ranks(2)
def test_requires_grad_is_switched(stage, segments):
    calls = [0]

    def step(model, x):
        calls[0] += 1
        model[2].requires_grad_(calls[0] % 3 != 0)
        model[0].weight.requires_grad_(calls[0] % 2 == 0)
        loss = model(x).square().sum()
        loss.backward()
        return loss

    def both(model, x):
        return step(model, x)

    def all_params(params):
        return sgd(params)

    check(mlp, both, mesh=line(), segments=segments, steps=6, optimizer=all_params, **ways(stage))


@stages
@on_ranks(2)
def test_inference_after_training(stage):
    model = check(mlp, mesh=line(), segments=EACH, **ways(stage))
    plain = mlp()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
    x = randn(5, 6)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            y = full(model(dt.shard_tensor(x, line(), [S0])))
        compare(y, plain(x).detach())
    at_rest(model, list(model.parameters()))


@on_ranks(2)
def test_hooks_after_accumulation():
    """Once in each backward, with the reduced gradient: to change it, or to step with it and drop
    it. A hook that was removed is not called."""
    results = []
    for stage in ("plain", *STAGES):
        torch.manual_seed(0)
        model = mlp()
        if stage != "plain":
            dt.shard_data_parallel(model, line(), segments=EACH, **ways(stage))
        calls: list[tuple[int, ...]] = []

        def halve(p, calls=calls):
            calls.append(tuple(p.shape))
            p.grad.mul_(0.5)

        @torch.no_grad()
        def step_and_drop(p):
            p.sub_(p.grad, alpha=0.1)
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]
        stepping = [p.register_post_accumulate_grad_hook(step_and_drop) for p in model.parameters()]
        found = []
        for i in range(4):
            if i == 2:
                for handle in stepping:
                    handle.remove()
            if i == 3:
                for handle in handles:
                    handle.remove()
            x = randn(5, 6, seed=i)
            x = x if stage == "plain" else dt.shard_tensor(x, line(), [S0])
            found += [full(squares(model, x)), gradients(model), sorted(calls)]
        results.append([*found, values(model)])
    for got in results[1:]:
        compare(got, results[0])
