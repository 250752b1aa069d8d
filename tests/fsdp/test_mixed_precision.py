"""Sharded modules in low precision: what is gathered, computed, summed and kept in which dtype;
recomputation."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Shard
from tests.support.micro import MICRO, batch_of, meshes, net, shard, step_of, values
from tests.support.pool import on_ranks

HALVES = [torch.bfloat16, torch.float16]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = ["scatter", "none", None]


def of_kind(log: Any, kind: str) -> list[Any]:
    return [record for record in log if record.kind == kind]


# What is sent in which dtype ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("low", HALVES, ids=str)
@on_ranks(2)
def test_copies_are_gathered_in_the_dtype_of_the_computation(low: torch.dtype, stage: int) -> None:
    """Half the bytes of float32. Gradients are summed in reduce_dtype, or in the same."""
    mesh = meshes()["fsdp"]
    logs = {}
    for dtypes in ((None, None), (low, None), (low, FP32)):
        param, wire = dtypes
        model = shard(net(FP32), mesh, stage=stage, param_dtype=param, reduce_dtype=wire)
        adam = torch.optim.Adam(model.parameters())
        for step in range(2):
            adam.zero_grad()
            with dt.debugging.record_comms() as log:
                out = model(batch_of(mesh, step, dtype=FP32))
                out.sum().backward()
            adam.step()
        assert out.dtype == (param or FP32)
        assert {p.dtype for p in model.parameters()} == {FP32}
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        assert {s["exp_avg"].dtype for s in adam.state.values()} == {FP32}
        kind = "all_reduce" if stage == 1 else "reduce_scatter"
        gathers, sums = of_kind(log, "all_gather"), of_kind(log, kind)
        assert len(log) == len(gathers) + len(sums)
        assert {r.dtype for r in gathers} == {param or FP32}
        assert {r.dtype for r in sums} == {wire or param or FP32}
        logs[dtypes] = sum(r.bytes for r in gathers), sum(r.bytes for r in sums)
    whole = logs[None, None]
    assert logs[low, None] == (whole[0] // 2, whole[1] // 2)
    assert logs[low, FP32] == (whole[0] // 2, whole[1])


# Sums that tell in which dtype they were made: 256 + 1 is 256 in bfloat16 -------------------------


def weigh(model: Any, mesh: Any, scale: list[float]) -> Any:
    """A backward in which rank i's contribution to each weight of a column is scale[i]. Returns the
    weights: a read of their gradient would add up what waits for the last micro-batch."""
    x = torch.tensor(scale).view(-1, 1)
    x = dt.shard_tensor(x, mesh, [Shard(0)] * mesh.ndim)
    model(x).sum().backward()
    return model.weight


def column(mesh: Any, **options: Any) -> Any:
    model = nn.Linear(1, 3, bias=False)
    return dt.shard_data_parallel(model, mesh, **options)


WAYS = [{"stage": 3}, {"stage": 2}, {"stage": 1}, {"shard_axis": None}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(2)
def test_contributions_are_summed_in_reduce_dtype(options: dict[str, Any]) -> None:
    mesh = meshes()["fsdp"]
    for wire, want in ((None, 256.0), (BF16, 256.0), (FP32, 257.0), (FP16, 257.0)):
        model = column(mesh, param_dtype=BF16, reduce_dtype=wire, **options)
        got = weigh(model, mesh, [256.0, 1.0]).grad.full_tensor()
        assert got.dtype == FP32 and got.flatten().tolist() == [want] * 3, (wire, got)


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(4)
def test_micro_batches_add_up_in_the_dtype_of_the_parameters(options: dict[str, Any]) -> None:
    """1024 + 4 + 4: in bfloat16 1024."""
    for mesh in meshes().values():
        for reduce in MODES:
            model = column(mesh, param_dtype=BF16, **options)
            for i, scale in enumerate((256.0, 1.0, 1.0)):
                if reduce is None:
                    weight = weigh(model, mesh, [scale] * 4)
                else:
                    with dt.accumulate(model, last=i == 2, reduce=reduce):
                        weight = weigh(model, mesh, [scale] * 4)
            got = weight.grad.full_tensor().flatten().tolist()
            assert got == [1032.0] * 3, (mesh, reduce, got)


class Part(nn.Module):
    """One of its parameters is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(5, 3), nn.Linear(5, 4)

    def forward(self, x: Any) -> Any:
        return self.used(x)


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(2)
def test_parameters_without_a_gradient_among_others(options: dict[str, Any]) -> None:
    mesh = meshes()["fsdp"]
    for reduce in MODES:
        model = dt.shard_data_parallel(Part(), mesh, param_dtype=BF16, **options)
        for step in range(2):
            step_of(model, mesh, step, reduce)
        assert model.used.weight.grad.dtype == FP32 and model.other.weight.grad is None


@pytest.mark.parametrize("low", HALVES, ids=str)
@on_ranks(4)
def test_training_in_low_precision_follows_float32(low: torch.dtype) -> None:
    """To the tolerance of the dtype; micro-batches in each mode, with and without replicas."""
    plain = net(FP32)
    want = torch.stack(values(step_of(plain, None, 0, None)))
    grads = values([p.grad for p in plain.parameters()])
    for mesh in meshes().values():
        for reduce in MODES:
            model = shard(net(FP32), mesh, param_dtype=low)
            got = torch.stack(values(step_of(model, mesh, 0, reduce))).float()
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
            for p, g in zip(model.parameters(), grads, strict=True):
                assert p.grad.dtype == FP32
                torch.testing.assert_close(p.grad.full_tensor(), g, rtol=5e-2, atol=3e-2)


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 3), nn.Linear(1, 3)

    def forward(self, x: Any, both: bool) -> Any:
        return self.one(x) + self.two(x) if both else self.one(x)


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(2)
def test_parameters_that_had_a_gradient_before(options: dict[str, Any]) -> None:
    """Zeros take their place on the wire, beside sums that are kept in another dtype."""
    mesh = meshes()["fsdp"]
    for reduce in MODES:
        model = dt.shard_data_parallel(Switch(), mesh, param_dtype=BF16, **options)
        x = dt.shard_tensor(torch.ones(2, 1), mesh, [Shard(0)])
        for both in (True, False):
            model.zero_grad()
            for i in range(2):
                scope: Any = contextlib.nullcontext()
                if reduce is not None:
                    scope = dt.accumulate(model, last=i == 1, reduce=reduce)
                with scope:
                    model(x, both).sum().backward()
            assert values([model.one.weight.grad])[0].tolist() == [[4.0]] * 3
            if both:
                assert values([model.two.weight.grad])[0].tolist() == [[4.0]] * 3
            else:
                assert model.two.weight.grad is None


# Autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(2)
def test_autocast(options: dict[str, Any]) -> None:
    """As one process under autocast: parameters are gathered as they are, and cast where they are
    used."""
    mesh = meshes()["fsdp"]
    plain, model = net(FP32), shard(net(FP32), mesh, **options)
    for m, of in ((plain, None), (model, mesh)):
        with torch.autocast("cpu", BF16):
            out = m(batch_of(of, 0, dtype=FP32))
        assert out.dtype == BF16
        out.float().square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == FP32 and q.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=3e-2, atol=3e-2)


# fp16 and its scaler ------------------------------------------------------------------------------


def scaled_step(model: Any, mesh: Any, scaler: Any, sgd: Any, factors: list[float]) -> None:
    """A step of a Linear of a row per factor, by which its gradient is multiplied."""
    x = dt.shard_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    weights = torch.tensor(factors)
    sgd.zero_grad()
    scaler.scale((model(x).float() * weights).sum()).backward()
    scaler.step(sgd)
    scaler.update()


@pytest.mark.parametrize("rows", [4, 1], ids=["both_hold_rows", "one_holds_none"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_one_infinite_shard_skips_the_step_everywhere(stage: int, rows: int) -> None:
    mesh = meshes()["fsdp"]
    torch.manual_seed(0)
    model = dt.shard_data_parallel(nn.Linear(3, rows), mesh, stage=stage, param_dtype=FP16)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = dt.optim.shard_scaler(
        torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    )
    before = values(list(model.parameters()))
    last = [0.0] * (rows - 1) + [
        60000.0
    ]  # times the scale it is infinite in fp16: one row, of one rank
    scaled_step(model, mesh, scaler, sgd, last)
    mine = [torch.isfinite(p.grad.to_local()).all().item() for p in model.parameters()]
    holder = 1 if rows == 4 else 0
    assert all(mine) is (dist.get_rank() != holder)
    assert scaler.get_scale() == 8.0
    assert all(map(torch.equal, values(list(model.parameters())), before))
    scaled_step(model, mesh, scaler, sgd, [1.0] * rows)  # the next one is taken, everywhere
    assert scaler.get_scale() == 8.0
    want = [b - 0.5 * 2.0 for b in before]
    got = values(list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(4)
def test_sums_near_the_limits_of_fp16(options: dict[str, Any]) -> None:
    """65504 above and 2**-24 below. What cancels does not pass the first on the way; what is small
    does not vanish."""
    cases = {
        "high": ([60000.0, -60000.0, 60000.0, -58976.0], 1024.0),
        "high, but for the other replicas": ([60000.0, 60000.0, -60000.0, -58976.0], 1024.0),
        "limit": ([16376.0] * 4, 65504.0),
        "low": ([2.0**-24 * 4] * 4, 2.0**-20),
    }
    for mesh in meshes().values():
        for name, (scale, want) in cases.items():
            if mesh.ndim == 1 and "replicas" in name:
                continue  # no order of adding is promised there
            for reduce in MODES:
                model = column(mesh, param_dtype=FP16, **options)
                for i in range(2):
                    if reduce is None:
                        weight = weigh(model, mesh, scale)
                        break
                    with dt.accumulate(model, last=i == 1, reduce=reduce):
                        weight = weigh(model, mesh, scale if i == 0 else [0.0] * 4)
                got = weight.grad.full_tensor().flatten().tolist()
                assert got == [want] * 3, (mesh, name, reduce, got)


# Recomputation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["blocks", "parts", "around"])
@pytest.mark.parametrize("reduce", MODES)
@on_ranks(2)
def test_one_gather_serves_recomputation_and_backward(reduce: str | None, how: str) -> None:
    """(2M + 1) K gathers with recomputation and without, of the same bytes, in the dtype of the
    computation."""
    mesh = meshes()["fsdp"]
    logs, grads = [], []
    for again in (False, True):
        model = net(FP32)
        model.around = again and how == "around"
        for block in model.blocks if again and how != "around" else ():
            part: Any = block.up if how == "parts" else block
            part.forward = lambda *x, f=part.forward: checkpoint(f, *x, use_reentrant=False)
        model = shard(model, mesh, param_dtype=BF16)
        for step in range(2):
            model.zero_grad()
            with dt.debugging.record_comms() as log:
                step_of(model, mesh, step, reduce)
        logs.append(sorted((r.kind, r.phase, r.bytes, str(r.dtype)) for r in log))
        grads.append(values([p.grad for p in model.parameters()]))
    assert logs[0] == logs[1]
    gathers = [entry for entry in logs[1] if entry[0] == "all_gather"]
    assert len(gathers) == (2 * len(model.blocks) + 1) * MICRO
    assert {entry[3] for entry in gathers} == {"torch.bfloat16"}
    assert all(map(torch.equal, *grads))


@on_ranks(2)
def test_batch_norm_beside_statistics_in_float32() -> None:
    """In training and in evaluation, of split batches and of whole ones."""
    mesh = meshes()["fsdp"]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    batches = [batch_of(None, i, dtype=FP32) for i in range(3)]
    plain = make()
    want = [plain.train(i < 2)(x) for i, x in enumerate(batches)]
    for stage in (1, 2, 3):
        for placement in (Shard(0), dt.Replicate()):
            model = dt.shard_data_parallel(make(), mesh, stage=stage, param_dtype=BF16)
            for i, x in enumerate(batches):
                y = model.train(i < 2)(dt.shard_tensor(x, mesh, [placement]))
                assert y.dtype is BF16
                torch.testing.assert_close(y.full_tensor().float(), want[i], rtol=0.05, atol=0.05)
                y.float().square().mean().backward()
            torch.testing.assert_close(
                model[1].running_var.full_tensor(), plain[1].running_var, rtol=0.02, atol=0.02
            )
