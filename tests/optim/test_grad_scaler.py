"""shard_scaler: whether a step is skipped is one decision of the world, whatever a rank has of the
parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.optim import grad_scaler
from tests.support.oracle import grid, line
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
}


def new_scaler(**options: Any) -> Any:
    return grad_scaler.shard_scaler(
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, **options)
    )


def leaf(mesh: ProcessMesh, layout: Sequence[Any], size: Sequence[int] = (3, 2)) -> Any:
    return dt.shard_tensor(torch.ones(*size), mesh, layout, requires_grad=True)


def train(
    optimizers: Sequence[Any], leaves: Sequence[Any], bad: Any, explicit: bool
) -> list[float]:
    """Four steps of a gradient of ones, of which the second has, on one rank, an infinite element;
    the scales.

    ``bad``: (a leaf, a rank): that rank writes it into its own piece."""
    scale, scales = new_scaler(), []
    scale.scale(torch.ones(()))  # of a rank that has no loss
    for n in range(4):
        for w in leaves:
            if getattr(w, "is_initialized", True):
                full = torch.ones(w.shape) * scale.get_scale()
                if isinstance(w, dt.DistTensor):
                    full = dt.shard_tensor(full, w.process_mesh, w.placements)
                w.grad = full
        if n == 1 and dist.get_rank() == bad[1]:
            with torch.no_grad():
                piece = bad[0].grad
                piece = piece.to_local() if isinstance(piece, dt.DistTensor) else piece
                piece.view(-1)[-1] = math.inf
        for optimizer in optimizers:
            if explicit:
                scale.unscale_(optimizer)
        for optimizer in optimizers:
            scale.step(optimizer)
        scale.update()
        scales.append(scale.get_scale())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, scales)
    assert everyone == [scales] * len(everyone)
    return scales


def three_steps(make: Any) -> Tensor:
    """What three steps with a gradient of one make of 1.0."""
    w = torch.ones((), requires_grad=True)
    optimizer = make([w])
    for _ in range(3):
        w.grad = torch.ones(())
        optimizer.step()
    return w.detach()


def check(optimizers: Any, leaves: Any, bad: Any, make: Any, explicit: bool = True) -> None:
    """One step of four is skipped on every rank for every optimizer that the bad leaf is in."""
    assert train(optimizers, leaves, bad, explicit) == [8.0, 4.0, 4.0, 8.0]
    for w in leaves:
        if getattr(w, "is_initialized", True):
            local = w.detach().to_local() if isinstance(w, dt.DistTensor) else w.detach()
            torch.testing.assert_close(local, three_steps(make).expand(local.shape))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [True, False])
@on_ranks(4)
def test_a_bad_piece_of_one_rank_skips_the_step_everywhere(name, explicit):
    """Tensor parallel, sharded and replicated leaves; 3 rows over 4 ranks leave one without an
    element."""
    make, mesh = OPTIMIZERS[name], grid()
    for at, rank in ((0, 1), (1, 2), (3, 0)):
        leaves = [leaf(mesh, p) for p in ([R, S0], [S0, S0], [R, R], [S1, R])]
        leaves.append(leaf(line(), [S0]))
        check([make(leaves)], leaves, (leaves[at], rank), make, explicit)


@pytest.mark.parametrize("name", ["sgd", "fused"])
@on_ranks(4)
def test_stages_and_optimizers_of_one_stage(name):
    """A rank has nothing of the other stage's parameters, and decides with it."""
    make = OPTIMIZERS[name]
    stages = [ProcessMesh([0, 1], ("tp",)), ProcessMesh([2, 3], ("tp",))]
    for rank in (0, 3):
        leaves = [leaf(mesh, [p]) for mesh in stages for p in (S0, R)]
        check([make(leaves)], leaves, (leaves[0 if rank == 0 else 2], rank), make)
    leaves = [leaf(mesh, [S0]) for mesh in stages]
    mine = leaves[:1] if dist.get_rank() < 2 else leaves[1:]  # of the rank's own stage
    check([make(mine)], mine, (leaves[1], 3), make)


@on_ranks(4)
def test_an_optimizer_without_parameters_on_this_rank_takes_part():
    make = OPTIMIZERS["sgd"]
    for rank in (0, 3):
        w = nn.Parameter(torch.ones(3)) if dist.get_rank() == rank else None
        leaves = [] if w is None else [w]
        check([make([{"params": leaves}])], leaves, (w, rank), make)


@on_ranks(2)
def test_plain_parameters_decide_together():
    make = OPTIMIZERS["adamw"]
    leaves = [nn.Parameter(torch.ones(3, 2)), leaf(line(), [S0])]
    check([make(leaves)], leaves, (leaves[0], 1), make)
    leaves = [nn.Parameter(torch.ones(3, 2))]
    check([make(leaves)], leaves, (leaves[0], 1), make)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks(2)
def test_a_parameter_listed_twice_is_unscaled_once():
    w = leaf(line(), [S0])
    v = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([w, v, w, v], 1.0)
    scale = new_scaler()
    scale.scale((w * 3.0).sum() + (v * 2.0).sum()).backward()
    scale.unscale_(sgd)
    assert w.grad.full_tensor().unique().tolist() == [3.0]
    assert v.grad.tolist() == [2.0] * 3


@on_ranks(4)
def test_one_number_is_sent_for_each_optimizer_after_one_reduction_of_gradients():
    w, v = leaf(grid(), [R, S0]), leaf(grid(), [R, S1])
    x = dt.shard_tensor(torch.ones(3, 3), grid(), [S0, R])
    scale = new_scaler()
    first, second = torch.optim.SGD([w], 0.1), torch.optim.SGD([v], 0.1)
    scale.scale((x @ w).sum() + (x @ v).sum()).backward()
    with dt.debugging.record_comms() as log:
        for optimizer in (first, second):
            scale.unscale_(optimizer)
            dt.clip_grad_norm_([w, v], 100.0)
            scale.step(optimizer)
        scale.update()
    sums = [r for r in log if r.axis == "dp"]
    assert sum(r.axis == "world" for r in log) == 2 and sum(r.axis == "tp" for r in log) == 2
    assert len(sums) == 2 and len(log) == 6  # the norm after the first reduced the second's too


@on_ranks(2)
def test_a_sum_that_is_infinite_where_no_share_of_it_is():
    w = dt.shard_tensor(torch.ones(2), line(), [R], requires_grad=True)
    x = dt.shard_tensor(torch.full((2, 2), 3e38), line(), [S0])
    sgd, scale = torch.optim.SGD([w], 0.1), new_scaler()
    scale.scale(w.sum() * 0.0)
    (x * w).sum().backward()
    scale.step(sgd)
    scale.update()
    assert scale.get_scale() == 4.0 and w.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_what_shard_scaler_refuses_and_leaves_alone():
    with pytest.raises(TypeError, match="GradScaler is expected, not Linear"):
        grad_scaler.shard_scaler(nn.Linear(2, 2))  # type: ignore[arg-type]
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"rank 0 has a scaler of .*2\.0.*rank 1 .*4\.0"):
        grad_scaler.shard_scaler(torch.amp.GradScaler("cpu", init_scale=2.0 + 2.0 * rank))
    off = grad_scaler.shard_scaler(torch.amp.GradScaler("cpu", enabled=False))
    w = leaf(line(), [S0])
    sgd = torch.optim.SGD([w], 1.0)
    with dt.debugging.record_comms() as log:
        off.scale(w.sum()).backward()
        off.unscale_(sgd)
        off.step(sgd)
        off.update()
    assert not log.records and w.full_tensor().unique().tolist() == [0.0]


@on_ranks(2)
def test_gradients_in_float16_are_refused_and_nobody_waits():
    """Stage 1 alone has them: stage 0 skips its step, and is not left in the middle of it."""
    stages = [ProcessMesh([rank], ("tp",)) for rank in (0, 1)]
    leaves = []
    for mesh, dtype in zip(stages, (torch.float32, torch.float16), strict=True):
        w = dt.shard_tensor(torch.ones(3, dtype=dtype), mesh, [R], requires_grad=True)
        if w.is_initialized:
            w.grad = dt.shard_tensor(torch.ones(3, dtype=dtype), mesh, [R])
        leaves.append(w)
    sgd, scale = torch.optim.SGD(leaves, 1.0), new_scaler()
    scale.scale(torch.ones(()))
    if dist.get_rank():
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scale.unscale_(sgd)
    else:
        scale.step(sgd)
        scale.update()
        assert leaves[0].tolist() == [1.0] * 3 and scale.get_scale() == 4.0


def test_in_a_world_of_one_it_is_torchs():
    w = nn.Parameter(torch.ones(2))
    sgd, scale = torch.optim.SGD([w], 1.0), new_scaler()
    scale.scale((w * torch.tensor([1.0, math.inf])).sum()).backward()
    scale.step(sgd)
    scale.update()
    assert scale.get_scale() == 4.0 and w.tolist() == [1.0, 1.0]
