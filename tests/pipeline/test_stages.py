"""Backward through stages: ``loss.backward()`` on every rank, values and gradients as in one
process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.oracle import randint, randn
from tests.support.pool import on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes


def layer(on: Stages, x, stage, n=5, m=6):
    """Linear and tanh with parameters of ``stage``: [*, m] -> [*, n]"""
    w = on.leaf(randn(n, m, seed=stage + len(on.leaves)), stage)
    b = on.leaf(randn(n, seed=stage + 1), stage)
    return torch.tanh(F.linear(x, w, b))


def chain(on: Stages):
    x = on.value(randn(7, 6), 0)
    for stage, (m, n) in enumerate([(6, 5), (5, 3), (3, 5), (5, 2)]):
        x = layer(on, on.to(x, stage), stage, n, m)
    return (x**2).mean()


def two_at_once(on: Stages):
    x = on.value(randn(7, 6), 0)
    a, b = layer(on, x, 0), layer(on, x * 2, 0)
    b, a = on.to(b, 1), on.to(a, 1)
    return (a * b.exp()).sum()


def crossing_ways(on: Stages):
    """One goes forth while another comes back."""
    a, b = layer(on, on.value(randn(7, 6), 0), 0), layer(on, on.value(randn(7, 6, seed=1), 1), 1)
    there, back = on.to(a, 1), on.to(b, 0)
    return (there * b).sum() + on.to((back * a).sum(), 1)


def skip(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    b = layer(on, on.to(a, 1), 1, 5, 5)
    c = layer(on, on.to(b, 2), 2, 5, 5)
    return (on.to(c, 3) + on.to(a, 3)).pow(3).mean()


def circular(on: Stages):
    x = on.value(randn(7, 6), 0)
    x = layer(on, x, 0)
    for visit in range(1, 5):
        x = layer(on, on.to(x, visit), visit, 5, 5)
    return on.to(x, 0).sum()


def unused_branch(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    lost = layer(on, on.to(a * 2, 1), 1, 5, 5)
    on.to(lost, 0)
    return on.to(a, 1).square().sum()


def detached(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    b = on.to(a.detach(), 1)
    return layer(on, b, 1, 5, 5).sum() + on.to(a, 1).sum()


def tied(on: Stages):
    """An embedding whose matrix is the head of the last stage too."""
    w = on.leaf(randn(11, 5), 0)
    x = F.embedding(on.value(randint(0, 11, (3, 4)), 0), w)
    x = layer(on, on.to(x, 1), 1, 5, 5)
    logits = F.linear(x, on.to(w, 1))
    targets = on.value(randint(0, 11, (12,), seed=2), 1)
    return F.cross_entropy(logits.flatten(0, 1), targets)


def masks(on: Stages):
    """Integers and booleans cross too, and need no gradient."""
    a = layer(on, on.value(randn(7, 6), 0), 0)
    mask = on.to(a > 0.1, 1)
    return torch.where(mask, on.to(a, 1), torch.zeros((), dtype=a.dtype)).sum()


def in_place(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    b = on.to(a, 1)
    c = torch.zeros_like(b)
    c += b
    c[1:3] = c[1:3] * 2
    c.mul_(on.leaf(randn(5, seed=9), 1))
    return on.to(c, 0).sum()


def views(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    b = on.to(a.t()[1:4], 1)
    return (b.reshape(-1)[::2] * on.to(a.sum(0), 1).sum()).sum()


def frozen(on: Stages):
    """The first stage has no parameter: nothing has to come back."""
    x = torch.tanh(on.value(randn(7, 6), 0))
    return layer(on, on.to(x, 1), 1).sum()


def recomputed(on: Stages):
    x = on.value(randn(7, 6), 0)
    w0, w1 = on.leaf(randn(5, 6), 0), on.leaf(randn(4, 5), 1)

    def first(x):
        return torch.tanh(F.linear(x, w0)).sin()

    def both(x):
        """The transfer is in the region that is computed again."""
        return F.linear(on.to(first(x).exp(), 1, whole=True).cos(), w1).tanh()

    if on.meshes is None:
        return both(x).sum() + first(x).sum()
    y = checkpoint(both, x, use_reentrant=False)
    return y.sum() + on.to(checkpoint(first, x, use_reentrant=False), 1).sum()


def scalars(on: Stages):
    s = layer(on, on.value(randn(7, 6), 0), 0).sum()
    return on.to(s, 1) * on.leaf(randn(1, seed=3), 1).squeeze()


def loss_on_the_first(on: Stages):
    a = layer(on, on.value(randn(7, 6), 0), 0)
    b = layer(on, on.to(a, 1), 1, 5, 5)
    return on.to(b, 0).sum() + a.sum()


def written_views(on: Stages):
    """A view sees what is written to its base later, and to another view of it."""
    a = layer(on, on.value(randn(7, 6), 0), 0)
    p = on.leaf(randn(5, seed=4), 0)
    b = a * 1
    first, rest = b[0], b[1:]
    b.mul_(p)
    c = a * 2
    one, other = c.t(), c[2:]
    other.add_(p)
    return on.to(first, 1).sum() + on.to(rest[0], 1).sum() * 2 + on.to(one, 1).sum()


def base_elsewhere(on: Stages):
    """The same, seen from the rank that sends what is written."""
    a = on.to(layer(on, on.value(randn(7, 6), 0), 0), 1, whole=True) * 1
    p = on.to(on.leaf(randn(5, seed=4), 0), 1)
    view = a[0]
    a.mul_(p)
    return view.sum()


PROGRAMS = [
    chain, two_at_once, crossing_ways, skip, circular, unused_branch, detached, tied, masks,
    in_place, views, frozen, recomputed,
    scalars, loss_on_the_first, written_views, base_elsewhere,
]  # fmt: skip
by_name = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)


@by_name
@on_ranks(2)
def test_two_stages(program):
    check_stages(program, stage_meshes())


@by_name
@pytest.mark.parametrize("seed", [0, 1, 2])
@on_ranks(4)
def test_two_stages_of_two(program, seed):
    check_stages(program, stage_meshes(), seed)


@by_name
@pytest.mark.parametrize("kind", [1, 3])
@on_ranks(4)
def test_more_stages(program, kind):
    check_stages(program, stage_meshes(kind), kind)
