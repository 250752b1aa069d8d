"""Values that two visits of a mesh read: their nodes run once, with the sum of all gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import pipeline
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")

ORDERS = {
    "gpipe": [0, 1, 0, 1], "interleaved_1f1b": [0, 1, 0, 1],
    "interleaved_zero_bubble": [0, 1, 0, 1], "zbv": [0, 1, 1, 0], "dualpipev": [0, 1, 1, 0],
}  # fmt: skip


class Clip(torch.autograd.Function):
    """A function whose backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx, x, y=None):
        return x * 1.0 if y is None else x * y

    @staticmethod
    def backward(ctx, g):
        return (g.clamp(max=0.01), g.clamp(max=0.02))[: len(ctx.needs_input_grad)]


class Kept:
    """What a mesh keeps from its first visit, for all its visits."""

    def __init__(self, log):
        self.log = log

    def clip(self, g):
        self.log.append("hook")
        return g.clamp(max=0.01)

    def hook(self, x, w):
        x = x * 1.0
        x.register_hook(self.clip)
        return x, w

    def function(self, x, w):
        return Clip.apply(x), w

    def retain(self, x, w):
        x = x.sin()
        x.retain_grad()
        self.log.append(x)
        return x, w

    def weight(self, x, w):
        w = w.clamp(-0.5, 0.5) * 2
        w.register_hook(self.clip)
        return x.detach(), w

    def received(self, x, w):
        if x.requires_grad:
            x.register_hook(self.clip)
        return x, w

    def written(self, x, w):
        x = x.sin()
        x.register_hook(self.clip)
        x[1:].mul_(2)
        return x, w

    def leaf(self, x, w):
        return x.detach(), w


def add(kept, x, w):
    return x + kept


def product(kept, x, w):
    return x * kept


def hooked(kept, x, w):
    """The node that reads leads to values of both visits, and has a hook."""
    y = x * kept
    y.register_hook(lambda g: g.clamp(max=0.02))
    return y


def function(kept, x, w):
    return Clip.apply(kept, x)


def recomputed(kept, x, w):
    return checkpoint(lambda a, b: torch.tanh(a * b @ w) * b, kept, x, use_reentrant=False)


PAIRS = [
    ("hook", hooked), ("function", product), ("retain", add), ("weight", recomputed),
    ("received", function), ("written", product), ("leaf", add),
]  # fmt: skip


def halve(leaf):
    leaf.grad.mul_(0.5)


def hook_leaves(leaves):
    for leaf in leaves:
        leaf.register_hook(lambda g: g.clamp(max=0.01))
        leaf.register_post_accumulate_grad_hook(halve)


def program(w, ways, meshes, make, read, log):
    def step(batch):
        x = (dt.shard_tensor(batch, meshes[0]) if meshes else batch) @ w[2]
        kept = {}
        for i, way in enumerate(ways):
            if i and way != ways[i - 1]:
                x = dt.reshard(x, meshes[way]) if meshes else x * 1
            if way not in kept:
                kept[way] = getattr(Kept(log), make)(x, w[way])
            x = torch.tanh(read(kept[way][0], x, w[2 + i]) @ kept[way][1] @ w[2 + i])
        return x.sum()

    return step


def trained(make, read, ways, meshes=None, schedule=""):
    """(losses, weights, log) of a run, or of one process if there are no meshes."""
    log = []
    places = [0, 1, *ways]
    w = [randn(5, 5, seed=9 + i).requires_grad_() for i in range(len(places))]
    batches = [randn(4, 5, seed=i) for i in range(3)]
    if meshes:
        w = [
            dt.shard_tensor(p.detach(), meshes[at], requires_grad=True)
            for p, at in zip(w, places, strict=True)
        ]
    if make == "leaf":
        hook_leaves(w[:2])
    step = program(w, ways, meshes, make, read, log)
    if meshes:
        stages = None if schedule == "gpipe" else [meshes[way] for way in ways]
        return pipeline.run(step, batches, schedule, stages=stages), w, log
    losses = [step(batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return losses, w, log


@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_a_node_that_two_visits_read_runs_once(schedule):
    for pair in PAIRS:
        want = trained(*pair, ORDERS[schedule])
        got = trained(*pair, ORDERS[schedule], stage_meshes(), schedule)
        calls, expected = got[2].count("hook"), want[2].count("hook")
        assert 2 * calls == expected, pair
        kept = [[x for x in log if x != "hook"] for log in (got[2], want[2])]
        for x, p in zip([*got[0], *got[1], *kept[0]], [*want[0], *want[1], *kept[1]], strict=True):
            if x.is_initialized:
                torch.testing.assert_close(x.detach().to_local(), p.detach())
                if p.requires_grad and p.dim():
                    torch.testing.assert_close(x.grad.to_local(), p.grad)


@on_ranks(2)
def test_hooks_of_a_leaf_with_uses_of_several_kinds_run_once():
    """The uses collect their gradients on several tensors, in other visits and parts of them."""
    mesh, aside = dt.ProcessMesh([0, 1], ("dp",)), dt.ProcessMesh([0, 1], ("other",))
    value, batches = randn(3, 3), [randn(4, 3, seed=i) for i in range(2)]

    def step(w, x, go):
        y = torch.tanh(x @ w) @ w
        y = go(go(y, aside), mesh)
        return (y * w.sum(0)).sum() + w.sum() * y.sum()

    plain = value.clone().requires_grad_()
    hook_leaves([plain])
    for batch in batches:
        step(plain, batch, lambda x, _: x).backward()
    for schedule in ("gpipe", "zero_bubble"):
        w = dt.shard_tensor(value, mesh, requires_grad=True)
        hook_leaves([w])

        def sharded(batch, w=w):
            return step(w, dt.shard_tensor(batch, mesh, [dt.Shard(0)]), dt.reshard)

        pipeline.run(sharded, batches, schedule, stages=[mesh])
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
