"""Activation checkpointing: what a region puts into the graph is its own, and what falls back in it
draws nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import fallbacks, line, place, randn
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)
X, W = randn(5, 4, seed=1), randn(4, 4, seed=2)


def again(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


# Functions without a rule, or that gather, of which the shape may depend on data.
FALLBACKS = {
    "mask": lambda a: a.sin()[a > 0].cos(),
    "nonzero": lambda a: a[torch.nonzero(a[:, 0] > 0)[:, 0]].cos(),
    "masked_select": lambda a: a.masked_select(a > 0) * 2,
    "unique": lambda a: a * a.detach().round().unique().numel(),
    "before dropout": lambda a: F.dropout(a[a > -9], 1.0) + a[a > -9],
    "nested": lambda a: again(lambda b: b[b > 0].sin(), a.cos()) * 2,
}


@on_ranks(2)
def test_a_fallback_in_a_region_draws_nothing():
    for name, f in FALLBACKS.items():
        grads = []
        for x in (X.clone().requires_grad_(), place(X, line(), [S0]).requires_grad_()):
            with fallbacks():
                y = again(f, x)
                y.square().sum().backward()
            grads += [y, x.grad]
        for mine, plain in zip(grads[2:], grads[:2], strict=True):
            torch.testing.assert_close(mine.detach().full_tensor(), plain.detach(), msg=name)


@on_ranks(2)
def test_a_region_that_draws_more_in_its_recomputation_is_an_error():
    state = []

    def region(a):
        state.append(0)
        return torch.renorm(a, 2, 0, 1.0) if len(state) == 1 else F.dropout(a, 0.5)

    x = place(X, line(), [S0]).requires_grad_()
    with pytest.raises(RuntimeError, match="draws random numbers 1 times, its forward did so 0"):
        again(region, x.sin()).sum().backward()


def programs():
    """Uses of a captured tensor, which vary over an axis, in and around regions."""

    def block(x, w):
        return torch.relu(x @ w.t()).cos() + (x @ w.t()).sum()

    yield "in two", lambda x, w: again(lambda b: block(b, w), again(lambda b: block(b, w), x))
    yield "before", lambda x, w: block(x, w) + again(lambda b: block(b, w), x)
    yield "after", lambda x, w: again(lambda b: block(b, w), x) + block(x, w)
    yield (
        "nested",
        lambda x, w: (
            again(lambda b: block(again(lambda c: block(c, w), b), w), x) + again(block, x, w)
        ),
    )


@on_ranks(2)
def test_a_captured_tensor_with_hooks_is_used_in_and_around_regions():
    for hooked in (True, False):
        for of in (lambda w: w, torch.sin):
            for name, program in programs():
                grads = []
                for x, w in ((X, W), (place(X, line(), [S0]), place(W, line(), [R]))):
                    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
                    if hooked:
                        w.register_hook(lambda g: g * 2)
                    used, seen = of(w), []
                    y = program(x, used)
                    if hooked:
                        used.register_hook(lambda g, seen=seen: seen.append(1))
                    y.square().sum().backward()
                    assert bool(seen) == hooked
                    grads += [x.grad, w.grad]
                for mine, plain in zip(grads[2:], grads[:2], strict=True):
                    torch.testing.assert_close(mine.full_tensor(), plain, msg=f"{name} {hooked}")


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@pytest.mark.parametrize("split", [False, True])  # True: no rule, it runs on full tensors
@on_ranks(2)
def test_statistics_are_written_again_as_in_one_process(split):
    plain, ours = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    dt.shard_module(ours, line(), {"running_*": [S0]} if split else {})
    x = torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4)
    for norm, batch in ((plain, x), (ours, place(x, line(), [S0]))):
        again(norm, batch.detach().requires_grad_()).sin().sum().backward()
    for mine, expected in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)
