"""Modes of the user around forwards and backwards under shard_data_parallel: they see what the
program computes, and nothing of the engine's work. So selective recomputation replays it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import disttensor as dt
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import STAGES, check, line, mesh_of, squares, ways

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
CHEAP = {aten.tanh.default, aten.t.default, aten.view.default, aten.mul.Tensor}


def save_products(ctx, op, *args, **kwargs):
    save = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def save_all_but_cheap(ctx, op, *args, **kwargs):
    save = op not in CHEAP
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def save_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def save_every_other():
    turn = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs):
        turn[ctx.is_recompute] += 1
        save = turn[ctx.is_recompute] % 2
        return CheckpointPolicy.PREFER_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES = {
    "products": lambda: PRODUCTS,
    "products by a function": lambda: save_products,
    "all but cheap": lambda: save_all_but_cheap,
    "nothing": lambda: save_nothing,
    "every other": save_every_other,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x))) * self.scale


class Net(nn.Module):
    def __init__(self, policy=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.policy = policy

    def forward(self, x):
        for block in self.blocks:
            if self.policy is None:
                x = block(x)
                continue
            contexts = functools.partial(create_selective_checkpoint_contexts, self.policy())
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


SEGMENTS = {
    "each": ["blocks.*"],
    "parts": ["blocks.*.first", "blocks.*.second"],
    "first": ["blocks.0"],
    "one": dt.fsdp.SegmentBySize(),
    "anchors": dt.fsdp.SegmentByAnchors(["blocks.0", "blocks.1.second"]),
}
CASES = list(itertools.product(SEGMENTS, STAGES, (0, 1, 2)))


def compare_to_plain(mesh, policy, segments, stage, prefetch):
    check(
        lambda: Net(POLICIES[policy]).double(),
        mesh=mesh, segments=SEGMENTS[segments], prefetch=prefetch, **ways(stage),
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2)
def test_selective_recomputation(policy):
    for case in [("each", 3, 1), ("first", 3, 1), *part(CASES, 3, policy)]:
        compare_to_plain(line(), policy, *case)


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(4)
def test_selective_recomputation_on_ranks_with_and_without_rows(policy):
    for case in [("each", 3, 1), *part(CASES, 1, f"4 {policy}")]:
        compare_to_plain(mesh_of((4,), ("fsdp",)), policy, *case)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Flops(FlopCounterMode):
    def __init__(self):
        super().__init__(display=False)

    @property
    def seen(self):
        return [self.get_total_flops()]


def watched(mode, model, x):
    """What a mode sees of the second step: all is known by then."""
    squares(model, x)
    model.zero_grad()
    with mode() as seen:
        squares(model, x)
    return seen.seen


@pytest.mark.parametrize("mode", [Operators, Functions, Flops])
@on_ranks(2)
def test_a_mode_sees_nothing_of_the_engine(mode):
    x = dt.shard_tensor(randn(5, 6), line(), [dt.Shard(0)])
    want = None
    for stage, segments, recompute in itertools.product((None, 1, 2, 3), SEGMENTS, (False, True)):
        policy = POLICIES["products"] if recompute else None
        model = Net(policy).double()
        dt.shard_data_parallel(model, line(), segments=SEGMENTS[segments], **ways(stage))
        seen = watched(mode, model, x)
        if not recompute:
            want = want or seen
            assert seen == want, (stage, segments)
        assert not [s for s in seen if "c10d" in str(s) or "foreach" in str(s)], seen


@on_ranks(2)
def test_modes_are_there_again_after_the_engine_and_in_hooks_of_the_user():
    model = dt.shard_data_parallel(Net().double(), line(), segments=["blocks.*"])
    x = dt.shard_tensor(randn(5, 6), line(), [dt.Shard(0)])
    outer, inner, functions = Operators(), Operators(), Functions()
    weight = model.blocks[0].first.weight
    weight.register_post_accumulate_grad_hook(lambda p: p.grad.local.erfinv())
    with outer, inner, functions:
        squares(model, x)
    assert outer.seen == inner.seen
    assert sum("erfinv" in s for s in inner.seen) == 1
    with pytest.raises(RuntimeError, match="same reduction dim"), outer, functions:
        model(x[:, :3])
    with outer, functions:
        squares(model, x)
    torch.ones(1)
    assert len(outer.seen) > len(inner.seen)
