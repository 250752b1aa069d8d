"""Parameters that need no gradient under shard_data_parallel: frozen, unfrozen and frozen again
between any two steps, with recomputation and inputs that require grad."""

from __future__ import annotations

import itertools
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import STAGES, check, line, mesh_of, ways


class Adapted(nn.Module):
    """A layer with a low-rank adapter and a scale."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.tanh(self.base(x) + self.b(self.a(x))) * self.scale


class Stack(nn.Module):
    def __init__(self, recompute=False, inputs=""):
        super().__init__()
        self.recompute, self.inputs = recompute, inputs
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(6, 3)
        if inputs == "by a hook":  # as enable_input_require_grads of transformers
            self.embed.register_forward_hook(lambda m, args, out: out.requires_grad_(True))

    def forward(self, x):
        h = self.embed((x.sum(-1).abs() * 7).long() % 9)
        if self.inputs == "detached":
            h = h.detach()
        if self.inputs == "a leaf":
            h = h.detach().requires_grad_()
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return self.head(h)


# Per step: the names whose parameters are trained
TRAINED = {
    "probe, then all": ["head.*", "head.*", "*", "*"],
    "all, then probe, then all": ["*", "head.*", "*"],
    "gradually": ["head.*", "head.*|blocks.2.*", "head.*|blocks.[12].*", "*"],
    "one scale": ["blocks.1.scale"] * 3,
    "one scale, then its block, then another": [
        "blocks.1.scale", "blocks.1.*", "blocks.0.base.bias", "blocks.0.*|blocks.2.scale",
    ],
    "adapters": ["blocks.*.a.*|blocks.*.b.*"] * 2 + ["*"],
    "all but the embedding": ["blocks.*|head.*"] * 3,
    "turns": ["blocks.0.*", "blocks.1.a.*", "embed.*", "blocks.2.*|embed.*"],
    "biases": ["*.bias"] * 2 + ["*.weight"],
}  # fmt: skip


def once(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def twice(model, x):
    y = model(x)
    first, second = y.square().sum(), y.sin().sum()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def accumulated(model, x):
    for i, part_of in enumerate((x, x * 0.5)):
        with dt.accumulate(model, last=i == 1) if hasattr(model, "_data_parallel") else no():
            loss = once(model, part_of)
    return loss


class no:
    __enter__ = __exit__ = lambda *_: None


def changing(step, trained):
    """The step, before which parameters are frozen and unfrozen."""
    turns = itertools.cycle(trained)

    def run(model, x):
        wanted = next(turns).split("|")
        for name, p in model.named_parameters():
            p.requires_grad_(any(fnmatch(name, w) for w in wanted))
        return step(model, x)

    return run


STEPS = [once, twice, accumulated]
INPUTS = ["", "detached", "a leaf", "by a hook"]
SEGMENTS = {
    "each": ["embed", "blocks.*", "head"],
    "parts": ["blocks.*.base", "blocks.*.a", "head"],
    "one": dt.fsdp.SegmentBySize(),
    "anchors": dt.fsdp.SegmentByAnchors(["embed", "blocks.1"]),
}
CASES = list(itertools.product(STEPS, (False, True), INPUTS, SEGMENTS, STAGES))


def compare_to_plain(trained, mesh, step, recompute, inputs, segments, stage):
    if inputs == "detached" and not any(fnmatch("head.bias", w) for w in trained):
        trained = [f"{wanted}|head.bias" for wanted in trained]  # something needs a gradient
    options = {**ways(stage), "segments": SEGMENTS[segments]}
    steps = changing(step, trained)
    check(
        lambda: Stack(recompute, inputs=inputs).double(),
        steps, mesh=mesh, steps=len(trained), **options,
    )  # fmt: skip


@pytest.mark.parametrize("trained", TRAINED)
@on_ranks(2)
def test_what_is_frozen_changes_between_steps(trained):
    always = [(once, False, "", "each", 3), (once, True, "by a hook", "each", 3)]
    for case in always + part(CASES, 2, trained):
        compare_to_plain(TRAINED[trained], line(), *case)


@pytest.mark.parametrize("trained", TRAINED)
@on_ranks(4)
def test_what_is_frozen_changes_on_ranks_with_and_without_rows(trained):
    mesh = mesh_of((4,), ("fsdp",))
    for case in part(CASES, 1, f"4 {trained}"):
        compare_to_plain(TRAINED[trained], mesh, *case)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_what_is_frozen_changes_under_autocast(recompute, stage):
    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return loss

    check(
        lambda: Stack(recompute, inputs="by a hook"),
        changing(step, TRAINED["one scale, then its block, then another"]),
        mesh=line(), segments=SEGMENTS["each"], stage=stage, steps=4, tolerance=0.05,
        batches=[randn(5, 6, seed=i).float() for i in range(4)],
    )  # fmt: skip
