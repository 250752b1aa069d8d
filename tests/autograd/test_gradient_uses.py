"""When gradients are reduced, how many at once, and of whom: parameters of several uses, buckets,
whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from disttensor.gradients import sync
from tests.support.oracle import check_program, compare_replicas, grid, line, place, randn
from tests.support.pool import on_ranks

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


def sent(log: dt.debugging.CommLog) -> list[tuple[str, str]]:
    return [(r.kind, r.axis) for r in log]


def synced(params: Any) -> list[tuple[str, str]]:
    with dt.debugging.record_comms() as log:
        dt.sync_gradients(params)
    return sent(log)


# Uses ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_images_cut_along_their_height():
    def program(w, b, v, images):
        x = F.gelu(F.conv2d(images, w, b, padding=1))
        return F.conv2d(x, v, stride=2).square().mean()

    weights = [(randn(4, 3, 3, 3), [R]), (randn(4), [R]), (randn(2, 4, 1, 1), [R])]
    ours = check_program(program, weights, randn(2, 3, 7, 5), mesh=line(), layouts=[[S2]], steps=2)
    assert [p.grad.partial_status for p in ours] == [{0: "sum"}] * 3
    assert synced(ours) == [("all_reduce", "x")]


@pytest.mark.parametrize("steps", [1, 3])
@on_ranks(4)
def test_one_parameter_in_every_way(steps):
    """Varying over one axis, the other, both and none, as a view, as a product, sliced, and
    elementwise."""

    def program(w, x, y, z, whole):
        out = (F.linear(x, w).square().sum() + torch.tanh(y @ w).sum()) / 7
        out = out + (z @ w.t()).sum() + (whole @ w).cos().sum()
        return out + w.square().sum() + (x * (w * 0.5).sum(0)).sum() + F.linear(y, w[1:3]).sum()

    data = [randn(5, 6, seed=i) for i in range(4)]
    layouts = [[S0, R], [R, S0], [S0, S0], [R, R]]
    for layout in ([R, R], [S0, R], [R, S1]):
        ours = check_program(
            program, [(randn(6, 6), layout)], *data, layouts=layouts, mesh=grid(), steps=steps
        )
        split = [a for a, p in enumerate(layout) if p != R]
        names = "+".join(n for a, n in enumerate(("dp", "tp")) if a not in split)
        assert synced(ours) == [("all_reduce", names)]
        assert synced(ours) == []
        compare_replicas([ours[0].grad])


@on_ranks(4)
def test_the_whole_gradient_and_the_contributions_after_it_add_up():
    """A reduced gradient (twice, in turn with backward passes) joins the next contributions
    once."""
    w, plain = place(randn(6, 5), grid(), [R, S0]).requires_grad_(), randn(6, 5).requires_grad_()
    for i in range(3):
        x = randn(7, 5, seed=i)
        F.linear(place(x, grid(), [S0, R]), w).square().sum().backward()
        F.linear(x, plain).square().sum().backward()
        assert synced([w]) == [("all_reduce", "dp")]
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


# What sync_gradients is given, and buckets --------------------------------------------------------


def waiting(n: int = 3, dtype: torch.dtype = torch.float64, size: int = 5) -> list[Any]:
    """Leaves on the grid whose gradients wait on dp."""
    leaves = [place(randn(size, 4, seed=i, dtype=dtype), grid(), [R, S0]) for i in range(n)]
    x = place(randn(3, 4, dtype=dtype), grid(), [S0, R])
    for w in leaves:
        w.requires_grad_()
        F.linear(x, w).square().sum().backward()
    return leaves


class Holder(nn.Module):
    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        for i, t in enumerate(tensors):
            self.register_parameter(f"p{i}", nn.Parameter(t))


@on_ranks(4)
def test_modules_tensors_lists_and_generators():
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    for form in (
        list, tuple, iter, lambda ws: (w for w in ws), lambda ws: dict.fromkeys(ws),
        lambda ws: [*ws, *ws, plain, nn.Parameter(torch.ones(2))],
    ):  # fmt: skip
        assert synced(form(waiting())) == [("all_reduce", "dp")]
    w = waiting(1)[0]
    assert synced(w) == [("all_reduce", "dp")] and synced(w) == []
    assert plain.grad.tolist() == [1.0] * 3
    one, two = waiting(2)
    with dt.debugging.record_comms() as log:
        dt.sync_gradients(one, [two, plain])
    assert sent(log) == [("all_reduce", "dp")]
    model = nn.Linear(4, 3).double()
    dt.shard_module(model, grid(), {"weight": [R, S0]})
    model(place(randn(5, 4), grid(), [S0, R])).sum().backward()
    assert len(synced(model)) == 2 and synced(model) == []  # bias: over dp and tp
    assert synced([]) == [] and synced(plain) == []


@on_ranks(4)
def test_buckets_are_cut_alike_on_all_ranks():
    """5 rows over 2 ranks are 3 and 2: every rank cuts as for 3, and sums as it would alone."""
    alone = waiting(5)
    for w in alone:
        dt.sync_gradients([w])
    row = 4 * 8
    for cap, per_bucket in ((1, [1] * 5), (6 * row, [2, 2, 1]), (14 * row, [4, 1]), (2**25, [5])):
        ours = waiting(5)
        with pytest.MonkeyPatch.context() as patch, dt.debugging.record_comms() as log:
            patch.setattr(sync, "BUCKET_BYTES", cap)
            dt.sync_gradients(ours)
        assert [r.shape for r in log] == [(n * 3 * 4,) for n in per_bucket], cap
        for w, v in zip(ours, alone, strict=True):
            assert torch.equal(w.grad.to_local(), v.grad.to_local())
            assert w.grad.to_local().shape == w.to_local().shape


@on_ranks(4)
def test_dtypes_and_meshes_have_flat_tensors_of_their_own():
    other = ProcessMesh(torch.arange(4), ("x",))
    v = place(randn(3, 4), other, [R]).requires_grad_()
    F.linear(place(randn(5, 4), other, [S0]), v).sum().backward()
    leaves = [*waiting(2), v, *waiting(2, torch.float32)]
    assert sorted(synced(leaves)) == [("all_reduce", "dp")] * 2 + [("all_reduce", "x")]


@on_ranks(2)
def test_debug_mode_tells_gradients_of_one_size_apart():
    """A program that differs between ranks would add up gradients of different parameters."""
    leaves = [place(randn(3, 3), line(), [R]).requires_grad_() for _ in range(2)]
    with dt.debugging.compare_ranks(seconds=5):
        (place(randn(4, 3), line(), [S0]) @ leaves[torch.distributed.get_rank()]).sum().backward()
        text = r"rank 0: sync_gradients of 0: f64(.|\n)*rank 1: sync_gradients of 1: f64"
        with pytest.raises(dt.errors.MismatchError, match=text):
            dt.sync_gradients(leaves)


# Whole steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
@on_ranks(4)
def test_scaler_clipping_and_optimizer_share_one_reduction(foreach, fused):
    """One flat reduction of gradients, one number for infinities, a few for the norm; and one
    process agrees."""
    mesh = grid()
    plain = [randn(7, 4, dtype=torch.float32).requires_grad_() for _ in range(2)]
    leaves = [place(w.detach(), mesh, [R, S0]).requires_grad_() for w in plain]
    x = randn(3, 4, dtype=torch.float32)
    logs = []
    for ws, data in ((plain, x), (leaves, place(x, mesh, [S0, R]))):
        sgd = torch.optim.SGD(
            ws, 0.1, momentum=0.9, fused=fused, foreach=None if fused else foreach
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(2):
            sgd.zero_grad()
            loss = sum(F.linear(data, w).square().sum() for w in ws)
            scaler.scale(loss).backward()
            with dt.debugging.record_comms() as log:
                scaler.unscale_(sgd)
                nn.utils.clip_grad_norm_(ws, 0.5, foreach=foreach)
                scaler.step(sgd)
                scaler.update()
            logs.append(log)
    assert not logs[0].records and not logs[1].records
    for log in logs[2:]:
        assert sent(log) == [("all_reduce", "dp"), ("all_reduce", "tp"), ("all_reduce", "tp")], log
        assert log[0].shape == (2 * 4 * 4,) and max(r.bytes for r in log[1:]) < 50
    for w, p in zip(leaves, plain, strict=True):
        torch.testing.assert_close(w.detach().full_tensor(), p.detach())


@on_ranks(4)
def test_data_parallel_steps_send_gradients_and_nothing_else():
    mesh = line()
    w = place(randn(7, 4, dtype=torch.float32), mesh, [R]).requires_grad_()
    F.linear(place(randn(3, 4, dtype=torch.float32), mesh, [S0]), w).square().sum().backward()
    adam = torch.optim.AdamW([w])
    with dt.debugging.record_comms() as log:
        dt.clip_grad_norm_([w], 1.0)
        adam.step()
    assert sent(log) == [("all_reduce", "x")]


# Optimizers of parameters that are no longer the model's ------------------------------------------


def plan_function(name: str, module: nn.Module, mesh: ProcessMesh) -> None:
    if name == "0":
        module.weight = dt.shard_tensor(module.weight, mesh, [R, S0])


@pytest.mark.parametrize("plan", [{"0.weight": [R, S0]}, plan_function], ids=["plan", "function"])
@on_ranks(4)
def test_an_optimizer_built_before_sharding_is_told_so(plan):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    beside = nn.Parameter(torch.ones(2))
    old = [*model.parameters(), beside]
    values = [p.detach().clone() for p in old]
    optimizer, scaler = torch.optim.AdamW(old), torch.amp.GradScaler("cpu", init_scale=2.0)
    dt.shard_module(model, grid(), plan)
    loss = (model(torch.ones(3, 4)) * beside).sum()
    scaler.scale(loss).backward()
    stale = (
        r"4 of its parameters are no longer(.|\n)*'0.weight' became f32\[5@tp, 4\](.|\n)*"
        "after sharding"
    )
    with pytest.raises(RuntimeError, match=rf"AdamW: {stale}"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=rf"clip_grad_norm_: {stale}"):
        nn.utils.clip_grad_norm_(old, 1.0)
    with pytest.raises(RuntimeError, match=rf"clip_grad_norm_: {stale}"):
        dt.clip_grad_norm_(old, 1.0)
    with pytest.raises(RuntimeError, match=rf"GradScaler with AdamW: {stale}"):
        scaler.unscale_(optimizer)
    assert not optimizer.state and all(map(torch.equal, old, values))
    fresh = torch.optim.AdamW([*model.parameters(), beside])
    scaler.step(fresh)
    assert len(fresh.state) == 5
    dt.shard_module(model, grid(), {})  # what is sharded stays, and nothing is stale
    fresh.step()


@pytest.mark.parametrize("written", ["nothing", "the table", "the result"])
@on_ranks(2)
def test_a_table_that_every_sequence_reads_waits_with_the_others(written):
    mesh = dt.init_mesh((2,), ("dp",))
    table = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    data = torch.randn(4, 5, 3, dtype=torch.float64)
    weight = dt.shard_tensor(table, mesh)
    x = dt.shard_tensor(data, mesh, [dt.Shard(0)])

    def loss_of(weight, x):
        places = F.embedding(torch.arange(5), weight)
        if written == "the table":
            with torch.no_grad():
                weight.mul_(2.0)
        elif written == "the result":
            places[1:].mul_(3.0)
        return (x * places).square().sum()

    with dt.debugging.record_comms() as sent:
        loss = loss_of(weight, x)
        loss.backward()
    assert weight.grad.partial_status == ({0: "sum"} if written == "nothing" else {})
    assert len(sent.records) == (written != "nothing")
    plain = loss_of(table, data)
    plain.backward()
    torch.testing.assert_close(loss.full_tensor(), plain)
    torch.testing.assert_close(weight.grad.full_tensor(), table.grad)
