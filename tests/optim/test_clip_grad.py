"""Clipping by global norm, GradScaler and optimizers over several meshes: as one process does it,
on every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.oracle import grid, randint, randn
from tests.support.pool import on_ranks
from tests.support.stages import Stages, stage_meshes

ORDERS = (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf)


def torchs_clip_norm(*args, **kwargs):
    return torch.nn.utils.clip_grad_norm_.__wrapped__(*args, **kwargs)


def two_stages(on: Stages):
    """A loss that depends on parameters of both stages, one of them used on both."""
    w = on.leaf(randn(11, 5), 0)
    x = F.embedding(on.value(randint(0, 11, (3, 4)), 0), w)
    x = torch.tanh(F.linear(x, on.leaf(randn(7, 5), 0), on.leaf(randn(7), 0)))
    x = torch.tanh(F.linear(on.to(x, 1), on.leaf(randn(5, 7), 1), on.leaf(randn(5), 1)))
    logits = F.linear(x, on.to(w, 1))
    targets = on.value(randint(0, 11, (12,), seed=2), 1)
    return F.cross_entropy(logits.flatten(0, 1), targets)


def both(program, meshes, seed=0):
    """(plain, staged) after their backward."""
    plain, staged = Stages(None), Stages(meshes, seed)
    for on in (plain, staged):
        program(on).backward()
    return plain, staged


def same_grads(plain, staged):
    grads = [x.grad.full_tensor() for x in staged.leaves if x.grad is not None]
    here = [p for p, x in zip(plain.leaves, staged.leaves, strict=True) if x.is_initialized]
    assert len(grads) == len(here)
    for g, p in zip(grads, here, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-9, atol=1e-12)


def same_values(plain, staged):
    for x, p in zip(staged.leaves, plain.leaves, strict=True):
        value = x.detach().full_tensor(everywhere=True)
        torch.testing.assert_close(value, p.detach(), rtol=1e-9, atol=1e-11)


def check_clip(meshes, seed, how, program=two_stages, **kwargs):
    for order in ORDERS:
        plain, staged = both(program, meshes, seed)
        expected = torchs_clip_norm(plain.leaves, 0.01, order, **kwargs)
        norm = how(staged.leaves, 0.01, order, **kwargs)
        assert type(norm) is torch.Tensor and norm.dtype == expected.dtype
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-12)
        same_grads(plain, staged)


@on_ranks(2)
def test_norm_over_two_stages():
    for how in (dt.clip_grad_norm_, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_):
        for foreach in (None, False, True):
            check_clip(stage_meshes(), 0, how, foreach=foreach)


@pytest.mark.parametrize("seed", [0, 1, 2])
@on_ranks(4)
def test_norm_over_two_stages_of_two(seed):
    check_clip(stage_meshes(), seed, dt.clip_grad_norm_)
    check_clip(stage_meshes(3), seed, nn.utils.clip_grad_norm_)


@on_ranks(4)
def test_norm_over_meshes_that_overlap():
    """The whole world, a half of it, and the world in another shape."""
    meshes = [grid(), ProcessMesh([2, 3], ("tp",)), ProcessMesh([3, 2, 1, 0])]

    def program(on):
        x = on.value(randn(7, 6), 0)
        for stage, (m, n) in enumerate([(6, 5), (5, 3), (3, 5), (5, 2)]):
            x = torch.tanh(F.linear(on.to(x, stage), on.leaf(randn(n, m), stage)))
        return x.square().sum()

    for seed in (0, 1):
        for foreach in (None, False):
            check_clip(meshes, seed, dt.clip_grad_norm_, program, foreach=foreach)
    plain, staged = both(program, meshes)
    nn.utils.clip_grad_value_(plain.leaves, 0.01)
    nn.utils.clip_grad_value_(staged.leaves, 0.01)
    same_grads(plain, staged)
    nn.utils.clip_grads_with_norm_(plain.leaves, 0.001, torch.tensor(0.02))
    nn.utils.clip_grads_with_norm_(staged.leaves, 0.001, torch.tensor(0.02))
    same_grads(plain, staged)


@on_ranks(4)
def test_two_meshes_of_the_whole_world_need_no_collective_of_the_world():
    meshes = [grid(), ProcessMesh(range(4), ("x",))]
    plain, staged = both(two_stages, meshes)
    dt.sync_gradients(staged.leaves)
    with dt.debugging.record_comms() as comms:
        norm = dt.clip_grad_norm_(staged.leaves, 0.01)
    assert not comms.records
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.leaves, 0.01))
    same_grads(plain, staged)


@on_ranks(4)
def test_stages_add_one_small_collective():
    _, staged = both(two_stages, stage_meshes(), 0)
    dt.sync_gradients(staged.leaves)
    with dt.debugging.record_comms() as comms:
        dt.clip_grad_norm_(staged.leaves, 0.01)
    (record,) = comms.records
    assert (record.kind, record.axis) == ("all_reduce", "world")
    assert record.bytes < 100


@on_ranks(4)
def test_one_mesh_of_the_whole_world_adds_one_small_collective():
    counts = []
    for foreach in (None, False, True):
        for how in (torchs_clip_norm, nn.utils.clip_grad_norm_, dt.clip_grad_norm_):
            w = dt.shard_tensor(randn(7, 5), grid(), [Replicate(), Shard(0)], requires_grad=True)
            b = dt.shard_tensor(randn(7), grid(), [Replicate(), Shard(0)], requires_grad=True)
            x = dt.shard_tensor(randn(8, 5), grid(), [Shard(0), Replicate()])
            F.linear(x, w, b).square().sum().backward()
            with dt.debugging.record_comms() as comms:
                how([w, b], 0.1, foreach=foreach)
                torch.optim.AdamW([w, b]).step()
            counts.append([(r.kind, r.axis) for r in comms.records])
            assert all(r.bytes < 50 for r in comms.records if r.axis == "tp")
    for i, seen in enumerate(counts):
        if i != 3:  # torch's own function, one by one
            assert seen == [("all_reduce", "dp"), ("all_reduce", "tp")], (i, seen)


@on_ranks(2)
def test_plain_parameters_count_as_replicated():
    plain, staged = both(two_stages, stage_meshes())
    for on in (plain, staged):
        beside = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        beside.grad = randn(3)
        on.leaves.append(beside)
    for order in (2.0, math.inf):
        expected = nn.utils.clip_grad_norm_(plain.leaves, 0.5, order)
        norm = nn.utils.clip_grad_norm_(staged.leaves, 0.5, order)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(staged.leaves[-1].grad, plain.leaves[-1].grad)
    if torch.distributed.get_rank():
        staged.leaves[-1].grad = None
    with pytest.raises(
        RuntimeError, match="of regular tensors, some ranks have gradients and others none"
    ):
        dt.clip_grad_norm_(staged.leaves, 0.5)


@on_ranks(2)
def test_no_gradient_anywhere_and_on_one_stage_only():
    staged = Stages(stage_meshes())
    leaves = [staged.leaf(randn(3), 0), staged.leaf(randn(3, seed=1), 1)]
    assert dt.clip_grad_norm_(leaves, 1.0).item() == 0.0
    assert nn.utils.clip_grad_norm_(iter(leaves), 1.0).item() == 0.0
    (leaves[1] * 2).sum().backward()
    for order, expected in ((2.0, 12**0.5), (-math.inf, 2.0), (0.0, 1.0)):
        norm = nn.utils.clip_grad_norm_((p for p in leaves), 100.0, order)
        torch.testing.assert_close(norm, torch.tensor(expected, dtype=torch.float64))
    assert nn.utils.clip_grad_norm_(leaves[0], 1.0).item() == 0.0  # of the other stage alone


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_the_same_error_on_all_ranks():
    for bad in (math.nan, math.inf):
        staged = Stages(stage_meshes())
        leaves = [staged.leaf(randn(3), 0), staged.leaf(randn(3, seed=1), 1)]
        for p in leaves:
            (p * 2).sum().backward()
        if leaves[0].grad is not None:
            leaves[0].grad[1] = bad
        with pytest.raises(RuntimeError, match=r"2 parameters on 2 meshes is (nan|inf)"):
            dt.clip_grad_norm_(leaves, 1.0, error_if_nonfinite=True)
        norm = dt.clip_grad_norm_(leaves, 1.0)
        assert norm.isnan() if math.isnan(bad) else norm.isinf()


@on_ranks(2)
def test_a_norm_of_one_stage_is_refused():
    """Where torch's function was imported before disttensor, it sees the gradients of its own mesh
    alone."""
    _, staged = both(two_stages, stage_meshes())
    for how in (
        lambda: torchs_clip_norm(staged.leaves, 1.0),
        lambda: nn.utils.get_total_norm(here),
    ):
        here = [p.grad for p in staged.leaves if p.grad is not None]
        with pytest.raises(
            RuntimeError, match=r"not the whole world of 2 ranks(.|\n)*dt.clip_grad"
        ):
            how()


def test_plain_tensors_are_clipped_by_torch():
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 3.0)
    assert nn.utils.clip_grad_norm_([p], 1.0).item() == 6.0
    torch.testing.assert_close(p.grad.norm(), torch.tensor(1.0))
    assert nn.utils.clip_grad_norm_(p, 1.0, norm_type="inf").item() == pytest.approx(0.5)
    nn.utils.clip_grad_value_(p, 0.1)
    assert nn.utils.get_total_norm(p.grad).item() == pytest.approx(0.2)
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((q for q in ()), 1.0)
    assert nn.utils.clip_grad_norm_([], 1.0).item() == 0.0


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "sgd one by one": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=False),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True, amsgrad=True),
    "adamw one by one": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=False),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
}


class Again(Stages):
    """Two stages whose leaves are made in the first run and used by all."""

    made = None

    def run(self):
        self.made = iter(self.leaves) if self.leaves else None
        return two_stages(self)

    def leaf(self, full, stage):
        return super().leaf(full, stage) if self.made is None else next(self.made)


def check_steps(meshes, seed, make):
    plain, staged = Again(None), Again(meshes, seed)
    for on in (plain, staged):
        on.run()
        optimizer = make(on.leaves)
        for _ in range(2):
            optimizer.zero_grad()
            on.run().backward()
            nn.utils.clip_grad_norm_(on.leaves, 0.5)
            optimizer.step()
    same_values(plain, staged)
    for x in staged.leaves:
        assert x.is_leaf and x.requires_grad
    return plain, staged, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_steps_over_stages(name):
    _, staged, optimizer = check_steps(stage_meshes(), 1, OPTIMIZERS[name])
    for x in staged.leaves:  # no state where there is no value
        assert x.is_initialized or name == "adagrad" or not optimizer.state.get(x)


@on_ranks(2)
def test_steps_over_two_ranks():
    for name in ("sgd", "adamw"):
        check_steps(stage_meshes(), 0, OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw one by one", "adamw fused"])
@on_ranks(4)
def test_steps_over_meshes_that_overlap(name):
    check_steps([grid(), ProcessMesh([2, 3], ("tp",))], 0, OPTIMIZERS[name])


# GradScaler ---------------------------------------------------------------------------------------


def scaled_steps(on, make, poison):
    """Three steps, of which the gradient of ``poison`` (a leaf) is infinite in the second: (scales,
    skipped)"""
    on.run()
    optimizers = make(on.leaves)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for n in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(on.run()).backward()
        x = on.leaves[poison]
        if n == 1 and x.grad is not None:
            with torch.no_grad():
                x.grad[0] = math.inf if poison % 2 else math.nan
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if len(optimizers) == 1:  # a norm of nan would reach the other's gradients
            nn.utils.clip_grad_norm_(on.leaves, 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def check_scaler(meshes, seed, make):
    for poison in (0, 2, 3, 4):
        plain, staged = Again(None), Again(meshes, seed)
        expected = scaled_steps(plain, make, poison)
        assert scaled_steps(staged, make, poison) == expected
        assert expected == [1024.0, 512.0, 512.0, 1024.0]
        same_values(plain, staged)


@on_ranks(2)
def test_one_bad_gradient_skips_the_step_everywhere():
    check_scaler(stage_meshes(), 0, lambda ps: [torch.optim.SGD(ps, 0.1)])


@on_ranks(4)
def test_one_bad_gradient_of_a_piece_skips_the_step_everywhere():
    check_scaler(stage_meshes(), 1, lambda ps: [torch.optim.AdamW(ps, 0.1)])


@on_ranks(2)
def test_an_optimizer_for_each_stage():
    """A rank has no gradient of the other's parameters at all, and decides with it."""

    def make(leaves):
        return [torch.optim.SGD(leaves[:3], 0.1), torch.optim.SGD(leaves[3:], 0.1)]

    check_scaler(stage_meshes(), 0, make)


@on_ranks(2)
def test_fused_optimizers_skip_too():
    plain, staged = Again(None), Again(stage_meshes())
    make = OPTIMIZERS["adamw fused"]
    ends = []
    for on in (plain, staged):
        on.run()
        optimizer, scaler = make(on.leaves), torch.amp.GradScaler("cpu", init_scale=64.0)
        for n in range(3):
            optimizer.zero_grad()
            scaler.scale(on.run()).backward()
            if n == 1 and on.leaves[3].grad is not None:
                with torch.no_grad():
                    on.leaves[3].grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        ends.append(scaler.get_scale())
    assert ends == [32.0, 32.0]
    same_values(plain, staged)
