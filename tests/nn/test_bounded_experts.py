"""Experts with a bound on their tokens: values and gradients are those of one process, for every
layout, and no size is read on the host."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from tests.nn.test_experts import CHOICES, LAYOUTS, by_hand, compare, inputs, leaves, mlp
from tests.support.oracle import line, randint
from tests.support.pool import on_ranks
from tests.trace.test_compile import pytestmark  # noqa: F401


def bounded(x: Any, indices: Any, weights: Any, up: Any, down: Any, capacity: int = 3) -> Any:
    sent = dt.experts.dispatch_tokens(x, indices, up.shape[0], capacity=capacity)
    return dt.experts.combine_tokens(sent.apply(mlp, up, down), weights)


def first_tokens(indices: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which choices an expert takes, one after the other."""
    taken = dict.fromkeys(range(5), 0)
    kept = torch.zeros_like(indices, dtype=torch.bool)
    for at in itertools.product(*map(range, indices.shape)):
        expert = int(indices[at])
        kept[at] = expert in taken and taken[expert] < capacity
        taken[expert] = taken.get(expert, 0) + 1
    return kept


@pytest.mark.parametrize("choice", CHOICES)
def test_an_expert_gets_its_first_tokens(choice: str) -> None:
    for capacity in (1, 3, 20):
        args = inputs(CHOICES[choice])
        x, indices, weights, *parameters = args
        kept = first_tokens(indices, capacity)
        want = by_hand(x, indices, weights * kept, *parameters)
        torch.testing.assert_close(bounded(*args, capacity=capacity), want)


def test_an_index_outside_selects_no_expert() -> None:
    x, indices = torch.ones(3, 2), torch.tensor([[0, -1], [7, 1], [0, 0]], dtype=torch.uint8)
    sent = dt.experts.dispatch_tokens(x, indices, 2, capacity=2).apply(lambda rows, counts: rows)
    nan, inf = float("nan"), float("inf")  # of choices that select no expert, or are dropped
    weights = torch.tensor([[1.0, nan], [inf, 1.0], [1.0, nan]])
    assert dt.experts.combine_tokens(sent, weights)[:, 0].tolist() == [1.0, 1.0, 1.0]


def in_layouts(ranks: int) -> None:
    for shape, layouts in LAYOUTS.values():
        if torch.Size(shape).numel() == ranks:
            mesh = dt.init_mesh(shape, ("a", "b")[: len(shape)])
            for choice, capacity in (("any", 1), ("any", 20), ("a rank has none", 3)):
                run = partial(bounded, capacity=capacity)
                compare(inputs(CHOICES[choice]), mesh, layouts, run, run)


@on_ranks(2)
def test_on_two_ranks() -> None:
    in_layouts(2)


@on_ranks(4)
def test_on_four_ranks() -> None:
    in_layouts(4)


@on_ranks(2)
def test_no_tokens_other_layouts_and_half_precision() -> None:
    mesh, layouts = line(), [[Shard(0)], [Replicate()], [Shard(1)], [Partial()]]
    cases = itertools.product((0, 1, 5), layouts, (False, True), (torch.float32, torch.bfloat16))
    for rows, at, autocast, dtype in cases:
        if at == [Partial()] and dtype == torch.bfloat16:
            continue  # the summands are rounded before the call
        args = inputs(randint(0, 5, (rows, 2)))
        args = [t.to(dtype) if t.is_floating_point() else t for t in args]
        of_choices = at if at == [Shard(0)] else [Replicate()]
        mine = leaves(args, mesh, [at, of_choices, of_choices, [Shard(0)], [Shard(0)]])
        found = []
        for given in (leaves(args), mine):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = bounded(*given)
            out.float().square().sum().backward()
            tensors = [out.detach(), given[0].grad, given[3].grad]
            found.append([t.full_tensor() if given is mine else t for t in tensors])
        torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


@on_ranks(2)
def test_a_step_can_be_captured_and_compiled() -> None:
    mesh, args = line(), inputs(randint(0, 5, (8, 2)))
    x, indices, weights, up, down = leaves(args, mesh, [[Shard(0)]] * 5)
    optimizer = torch.optim.SGD([up, down], lr=0.1)
    start = [p.full_tensor() for p in (up, down)]

    def step(x: Any, run: Any = bounded) -> Any:
        optimizer.zero_grad()
        loss = run(x, indices, weights, up, down).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    wanted = [step(x.detach()).item() for _ in range(5)]
    for run in (bounded, dt.compile(bounded, backend="aot_eager")):
        with torch.no_grad():
            for p, value in zip((up, down), start, strict=True):
                p.copy_(dt.shard_tensor(value, mesh, [Shard(0)]))
        captured = dt.capture(partial(step, run=run)) if run is bounded else partial(step, run=run)
        assert [captured(x.detach()).item() for _ in range(5)] == wanted
    assert run.replays == 4 and run.why() == run.breaks() == []


def test_the_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="capacity"):
        dt.experts.dispatch_tokens(torch.ones(2, 2), torch.zeros(2, 1).long(), 2, capacity=0)
    with pytest.raises(TypeError, match="capacity"):
        dt.experts.dispatch_tokens(torch.ones(2, 2), torch.zeros(2, 1).long(), 2, capacity=1.5)  # type: ignore[arg-type]
